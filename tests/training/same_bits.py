"""States compared bit for bit."""

import equinox as eqx
import jax
import numpy as np


def leaves(tree):
    return [np.asarray(x).copy() for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def assert_same_bits(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8) if a.ndim else a, b.view(np.uint8) if b.ndim else b)
