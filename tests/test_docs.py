"""Every block of Python in the README and the docs runs as it stands, and links inside the project lead somewhere."""

import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks() -> list:
    """Each block of Python with the name of its page and its line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 2
            found.append(pytest.param(match.group(1), id=f"{page.name}:{line}"))
    return found


@pytest.mark.parametrize("code", blocks())
def test_a_block_of_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})
    assert "import" in code  # a block stands by itself


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_project_lead_somewhere(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []
