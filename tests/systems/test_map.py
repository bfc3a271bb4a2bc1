"""Every row of the page of systems names an existing module, test, and heading of an example."""

import pathlib
import re

import pytest


DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
MAP = (DOCS / "systems.md").read_text()
SIZES = {"A": 10, "B": 5, "C": 3, "D": 9, "E": 7}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#([^)]*))?\)")


def rows(text):
    """The cells of each row, by its name."""
    found = re.findall(r"^\| ([A-E]\d+) \|(.*)\|$", text, re.MULTILINE)
    assert len(found) == len(dict(found))
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in found}


def anchors(page):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(kind, cell):
    """The links of a cell that lead nowhere."""
    found, links = [], LINK.findall(cell)
    for text, target, anchor in links:
        path, name = (DOCS / target).resolve(), text.strip("`")
        if not path.is_file():
            found.append(target)
        elif kind == "example":
            found += [f"{target}#{anchor}"] if anchor not in anchors(path) else []
        else:
            keyword = "def" if kind == "test" else r"(?:(?:def|class) )?"
            is_there = re.search(rf"^{keyword} ?{re.escape(name)}\b", path.read_text(), re.MULTILINE)
            found += [] if is_there else [f"{target}: {name}"]
    return found if links else ["no link"]


def test_every_row_of_the_documents_is_there():
    assert list(rows(MAP)) == [f"{part}{number}" for part, size in SIZES.items() for number in range(1, size + 1)]


@pytest.mark.parametrize("name", rows(MAP))
def test_a_row_leads_somewhere(name):
    what, *cells = rows(MAP)[name]
    assert what and len(cells) == 3
    assert [link for kind, cell in zip(("module", "test", "example"), cells) for link in dead(kind, cell)] == []


def test_every_line_beside_the_published_program_names_a_test():
    page = (DOCS / "systems-jaxformer.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 3][1:]
    assert len(lines) > 15
    assert [link for line in lines for link in dead("test", line.split(" | ")[3])] == []


@pytest.mark.parametrize(
    "kind,cell",
    [
        ("module", "[`Stake`](../eqformer/nn/_stack.py)"),
        ("module", "[`Stack`](../eqformer/nn/_stock.py)"),
        ("test", "[`test_that_is_not`](../tests/systems/test_map.py)"),
        ("example", "[layouts](parallel-foundations.md#layoutz)"),
        ("example", "layouts"),
    ],
)
def test_control_a_dead_link_is_seen(kind, cell):
    assert dead(kind, cell)
