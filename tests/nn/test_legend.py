"""The legend names every dim of every family, and its page says the same."""

import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from eqformer import LEGEND, models, nn


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "vocabulary.md"
FIRST = {next(iter(family.presets)) for family in models.FAMILIES.values()}


def dims_of(model):
    return {dim for names in jax.tree.leaves(nn.dims(model)) if isinstance(names, str) for dim in names.split()}


@pytest.mark.parametrize(
    "preset", [name if name in FIRST else pytest.param(name, marks=pytest.mark.grid) for name in models.presets()]
)
def test_every_dim_of_a_model_is_in_the_legend(preset):
    shapes = eqx.filter_eval_shape(lambda: models.build(preset, key=jax.random.key(0)))
    assert {"vocab", "embed", "layers"} <= dims_of(shapes) <= {*LEGEND, "_"}


def test_a_dim_of_ones_own_is_not_in_it():
    class Mine(eqx.Module):
        table: Float[Array, "embed colours"]

    assert dims_of(Mine(jnp.ones((2, 3)))) - {*LEGEND} == {"colours"}


def test_the_page_has_the_words_of_the_legend():
    page = PAGE.read_text()
    assert is_legend(page)
    assert not is_legend(page.replace("`rank`", "`ranks`")) and not is_legend(page.replace("query heads;", "queries;"))


def is_legend(page):
    _, legend = page.split("## The legend\n")
    table = re.findall(r"^\| (`.*) \| (.*) \|$", legend.partition("\n## ")[0], re.MULTILINE)
    rows = [(re.findall(r"`(\w+)`", words), meanings) for words, meanings in table]
    said = {
        word: meaning for words, meanings in rows for word, meaning in zip(words, meanings.split("; "), strict=True)
    }
    return said == LEGEND
