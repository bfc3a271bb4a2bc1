"""Figures in the docs of recipes for many machines equal today's results of the formulas."""

import pytest
from scale_table import formulas, in_docs

from eqformer.recipes import LARGE


@pytest.mark.by_default("llama-3-8b-h100-8")
@pytest.mark.parametrize("name", LARGE)
def test_the_docs_have_what_formulas_give(name):
    assert in_docs()[name] == formulas(name)


@pytest.mark.quick
def test_every_recipe_has_a_row_of_its_own():
    rows = in_docs()
    assert list(rows) == list(LARGE) and len(set(rows.values())) == len(LARGE)
