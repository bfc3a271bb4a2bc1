"""The reference shows every public name of every room, and the site builds without warnings."""

import html
import importlib.util
import os
import re
import subprocess
import sys

import pytest
from test_rooms import listed_names, PACKAGE, ROOMS, ROOT


PAGES = ROOT / "docs" / "reference"
CONFIG = ROOT / ".mkdocs" / "mkdocs.yml"
SHOWN = re.compile(
    r"^(?:::: |### )eqformer((?:\.\w+)+)$", re.MULTILINE
)  # `::: eqformer.nn.MLP`, `### eqformer.kernels.blockwise`


def names_shown(page: str) -> list[str]:
    """The names, `nn.MLP`, that a page has a directive or a heading for; private files are none."""
    return [name[1:] for name in SHOWN.findall(page) if not re.search(r"\._[^_]", name)]


@pytest.mark.parametrize("room", ["", *sorted(ROOMS)])
def test_the_reference_has_every_public_name_once(room):
    public = [f"{room}.{name}".strip(".") for name in listed_names((PACKAGE / room / "__init__.py").read_text())]
    page = (PAGES / f"{room or 'index'}.md").read_text()
    assert len(public) > 2 and sorted(names_shown(page)) == sorted(public)
    some = public[len(public) // 2]
    assert sorted(names_shown(page.replace(f"eqformer.{some}\n", "\n"))) != sorted(public)  # the comparison can fail


@pytest.mark.grid
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="the extra `docs` is not installed")
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    assert "Documentation built" in done.stderr  # it logs: with -q it would count no warnings
    shown = {room: (tmp_path / "reference" / room / "index.html").read_text() for room in ROOMS}
    assert 'id="eqformer.nn.MLP"' in shown["nn"] and "output_std" in shown["nn"]
    text = html.unescape(re.sub(r"<[^>]+>", "", shown["nn"]))
    assert 'Float[Array, "*batch seq embed"]' in text  # a signature's shapes are read as they are written
    assert "Dropout(rate: float)" in text  # what builds a module without an `__init__` are its fields
    assert (tmp_path / "source" / "eqformer" / "nn" / "_linear.py" / "index.html").exists()  # which a page links to


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="the extra `docs` is not installed")
def test_links_lead_from_the_site_where_they_lead_from_the_repository(monkeypatch):
    monkeypatch.syspath_prepend(CONFIG.parent)
    rewritten = importlib.import_module("pages").rewritten
    code = "```python\nx[0](tests)\n```\n"
    text = f"[a](../eqformer/nn/_mlp.py) [b](data.md#sources) [c](../nowhere.py) ![d](pictures/loss.png)\n{code}"
    new, outside = rewritten(text, "docs/training.md", "training.md")
    assert outside == {"eqformer/nn/_mlp.py"}
    assert new == text.replace("../eqformer/nn/_mlp.py", "source/eqformer/nn/_mlp.py.md")
    new, _ = rewritten("[a](docs/data.md) ![b](docs/pictures/loss.png 'title')", "README.md", "index.md")
    assert new == "[a](data.md) ![b](pictures/loss.png 'title')"
    assert rewritten("[a](../../tests)", "docs/reference/nn.md", "reference/nn.md")[0] == "[a](../source/tests.md)"
