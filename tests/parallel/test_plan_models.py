"""The small models for the tests of plans."""

from typing import Any

import equinox as eqx
import jax
import pytest
from plan_blocks import BLOCKS


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_has_arrays_of_today(name: str):
    """Some blocks are used by the grid alone; a renamed argument must not wait for the grid."""
    for make in BLOCKS[name]:
        block = eqx.filter_eval_shape(make, jax.random.key(0))
        assert all(leaf.size > 0 for leaf in jax.tree.leaves(eqx.filter(block, eqx.is_array_like)))


def test_a_renamed_argument_is_seen(monkeypatch):
    """The negative control: a block that passes an unknown argument."""
    make: Any = BLOCKS["fading"][0]
    monkeypatch.setitem(BLOCKS, "renamed", (lambda key: make(key, norm_first=True),))
    with pytest.raises(TypeError, match="norm_first"):
        test_each_block_has_arrays_of_today("renamed")
