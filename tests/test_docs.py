"""Every block of Python in the README and the docs runs, and links inside of the project lead to files and headings.

A block that begins with `# name.py` is a file, which the other blocks of its page may import. A block below the line
`<!-- grid -->`, which readers do not see, runs in the grid only: it compiles for a second or longer, and other tests
cover its content.
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


def blocks() -> list:
    """Each block of Python with the files of its page, named by the page and its line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        files = {name.group(1): code for code in BLOCK.findall(text) if (name := FILE.match(code))}
        for match in BLOCK.finditer(text):
            name = f"{page.name}:{text[: match.start()].count(chr(10)) + 2}"
            marks = [pytest.mark.grid] if text[: match.start()].endswith("<!-- grid -->\n") else []
            found.append(pytest.param(match.group(1), files, id=name, marks=marks))
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


def long_lines(text: str) -> list[str]:
    """Return lines of prose above 120 characters. Code, tables, headings and pictures may have longer lines."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [line for line in prose.splitlines() if len(line) > 120 and not re.match(r"\s*(\||#|!\[| {4})", line)]


@pytest.mark.quick
def test_lines_of_prose_have_at_most_120_characters():
    assert [(page.name, line) for page in PAGES for line in long_lines(page.read_text())] == []
    assert long_lines("word " * 25) and not long_lines("| " + "word " * 25)  # the controls


def lines_of_tasks(page: str) -> dict[str, list[int]]:
    """Return the lines of each task's program and, if the page has it, of the program by hand, as the table counts."""
    programs = [(match.start(), match.group(1)) for match in BLOCK.finditer(page) if not FILE.match(match.group(1))]
    lines: dict[str, list[int]] = {}
    for start, program in programs:
        heading = re.findall(r"^##+ (.*)$", page[:start], re.MULTILINE)[-1].removesuffix(" by hand").lower()
        counted = [line for line in program.splitlines() if line and "from small import" not in line]
        lines.setdefault(heading, []).append(len(counted))
    return lines


@pytest.mark.quick
def test_the_table_of_ten_tasks_counts_the_lines_of_the_programs():
    page = (ROOT / "docs" / "ten_tasks.md").read_text()
    table = re.findall(r"^\| \[(.*)\]\(.*\) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    lines = lines_of_tasks(page)
    assert len(table) == 10 and {name.lower() for name, _, _ in table} == {*lines}
    for name, now, before in table:
        counts = lines[name.lower()]
        assert counts == [int(now), int(before)][: len(counts)] and (len(counts) == 2 or now == before), name
    assert lines_of_tasks(page.replace("import eqformer\n", "")) != lines  # the comparison can fail
