"""Every block of Python in the README and the docs runs as it stands, and links inside the project lead somewhere.

A block that begins with `# name.py` is a file, which the other blocks of its page may import. Most blocks that train by
`docs/extending.md`'s `trained.py` do so in the grid alone, as what they train is compared leaf by leaf in
`tests/parallel`; by default `trained` checks their models and plans, and trains nothing. For the grid alone are also
the page's program with an optimizer, which is compared there too, and the first blocks of two pages, which
`tests/systems` runs.
"""

import pathlib
import re
import sys

import pytest
from extending import BLOCK


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"# (\w+\.py)\n")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


IN_SYSTEMS = ("systems-classifier.md", "systems-regression.md")
UNTRAINED = """

def trained(build, plan=None, steps=3, rate=1e-2):
    plan = parallel.Plan(parallel.make_mesh(devices=jax.devices()[:1])) if plan is None else plan
    shapes = eqx.filter_eval_shape(build)
    plan.check(shapes, rows=8, seq=16)
    optimizer = training.optimizer("adamw", shapes, rate=rate)
    training.state_shardings(plan, optimizer, eqx.filter_eval_shape(training.init_state, shapes, optimizer))
    return shapes, [0.0] * steps
"""


def blocks() -> list:
    """Each block of Python with the files of its page, and the name of the page and its line."""
    found, trains = [], []
    for page in PAGES:
        text = page.read_text()
        codes = [match.group(1) for match in BLOCK.finditer(text)]
        files = {name.group(1): code for code in codes if (name := FILE.match(code))}
        for match in BLOCK.finditer(text):
            code, name = match.group(1), f"{page.name}:{text[: match.start()].count(chr(10)) + 2}"
            if "import trained" in code:
                trains.append(name)
            is_repeated = name in trains[1:]
            is_elsewhere = page.name in IN_SYSTEMS and code == codes[0]
            is_grid = is_repeated or is_elsewhere or "import cautious_lion" in code
            if is_repeated:
                untrained = files | {"trained.py": files["trained.py"] + UNTRAINED}
                found.append(pytest.param(code, untrained, id=f"{name} untrained"))
            found.append(pytest.param(code, files, id=name, marks=[pytest.mark.grid] if is_grid else []))
    return found


@pytest.mark.parametrize("code,files", blocks())
def test_a_block_of_python_runs(code, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})
    assert "import" in code  # a block stands by itself


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_project_lead_somewhere(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []
