"""Files of families are short, and the page of families states how many families are published."""

import ast
import inspect
from pathlib import Path

from eqformer import models


FOLDER = Path(inspect.getfile(models)).parent / "families"
LONGEST = 500


def defined(text: str) -> int:
    """How many families a file makes."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return sum(isinstance(call.func, ast.Name) and call.func.id == "Family" for call in calls)


def too_long(texts: dict[str, str], longest: int) -> list[str]:
    return [name for name, text in texts.items() if len(text.splitlines()) > longest]


def test_no_file_that_defines_a_family_is_long():
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    families = {name: text for name, text in texts.items() if defined(text)}
    assert sum(map(defined, families.values())) == len(models.FAMILIES)
    assert too_long(families, LONGEST) == []
    assert too_long(families | {"_long.py": "\n" * (LONGEST + 1)}, LONGEST) == ["_long.py"]


def test_the_page_says_how_many_are_published():
    """Those of a `model_type`; the others are built and loaded as runs alone."""
    published = [family for family in models.FAMILIES.values() if family.model_type is not None]
    others = {family.name for family in models.FAMILIES.values()} - {family.name for family in published}
    page = " ".join((Path(__file__).parents[2] / "docs" / "families.md").read_text().split())
    assert f"models (Hugging Face folders) of {len(published)} families" in page
    assert f"and {len(others)} more" in page and all(f"`{name}`" in page for name in others)
    assert f"of {len(published) + 1} families" not in page
