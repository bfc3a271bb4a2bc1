"""The leaves that `nn.matrices` marks as matrices, against lists by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqformer import nn
from eqformer.nn import Matrix


KEY = jax.random.key(0)


def model():
    def block(key):
        attention = nn.Attention(
            embed=6, heads=2, head_dim=4, bias=True, query_norm=nn.RMSNorm("head_dim", head_dim=4), key=key
        )
        return nn.Block(
            nn.Residual(attention, nn.RMSNorm("embed", embed=6)),
            nn.Residual(nn.MLP(embed=6, mlp=8, bias=True, key=key)),
        )

    return nn.Transformer(
        nn.Embedding(vocab=9, embed=6, key=KEY),
        (nn.Stack(block, 3, key=KEY),),
        nn.RMSNorm("embed", embed=6),
        nn.Linear("embed -> vocab", embed=6, vocab=9, bias=True, key=KEY),
        positions=nn.LearnedPositions(max_seq=5, embed=6, key=KEY),
    )


EXPECTED = {
    ".embedding.weight": Matrix(0, 1, 1, table=True),
    ".stacks[0].blocks.sublayers[0].layer.query.weight": Matrix(1, 2, 1, table=False),
    ".stacks[0].blocks.sublayers[0].layer.key.weight": Matrix(1, 2, 1, table=False),
    ".stacks[0].blocks.sublayers[0].layer.value.weight": Matrix(1, 2, 1, table=False),
    ".stacks[0].blocks.sublayers[0].layer.output.weight": Matrix(1, 1, 2, table=False),
    ".stacks[0].blocks.sublayers[1].layer.up.weight": Matrix(1, 1, 1, table=False),
    ".stacks[0].blocks.sublayers[1].layer.down.weight": Matrix(1, 1, 1, table=False),
    ".head.weight": Matrix(0, 1, 1, table=True, head=True),
    ".positions.weight": Matrix(0, 1, 1, table=True),
}


def test_every_weight_matrix_is_found_and_nothing_else():
    shapes = eqx.filter_eval_shape(model)
    marked = jax.tree_util.tree_leaves_with_path(nn.matrices(shapes), is_leaf=lambda x: isinstance(x, Matrix))
    assert {jax.tree_util.keystr(path): leaf for path, leaf in marked} == EXPECTED


def test_the_tree_maps_beside_its_model():
    def check(leaf, matrix):
        assert matrix is None or leaf.ndim == matrix.ensemble + matrix.outputs + matrix.inputs
        return 0 if matrix is None else 1

    tree = eqx.filter_eval_shape(model)
    assert sum(jax.tree.leaves(jax.tree.map(check, tree, nn.matrices(tree)))) == len(EXPECTED)


def test_foreign_linears_count_and_missing_weights_do_not():
    tree = {
        "linear": eqx.nn.Linear(2, 3, key=KEY),
        "table": eqx.nn.Embedding(4, 2, key=KEY),
        "ensemble": eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))(jax.random.split(KEY, 5)),
    }
    marked = nn.matrices(tree)
    assert marked["linear"].weight == Matrix(0, 1, 1, table=False) and marked["linear"].bias is None
    assert marked["table"].weight == Matrix(0, 1, 1, table=True)
    assert marked["ensemble"].weight == Matrix(1, 1, 1, table=False)
    # As a filter leaves it: no weight, no mark.
    nothing = nn.matrices(eqx.filter(tree, lambda leaf: False))
    assert jax.tree.leaves(nothing) == []


class Pairs(nn.EmbeddingTable):
    """A table with two vectors for each id, as a user may write it."""

    weight: Float[Array, "ids sides embed"]

    @property
    def vector_dims(self) -> int:
        return 2


def test_a_table_states_the_dims_of_its_vectors():
    tables = {
        "values": nn.ValueEmbedding(vocab=9, kv_heads=2, head_dim=4, key=KEY),
        "pairs": Pairs(jnp.ones((9, 2, 6))),
    }
    layers = eqx.filter_vmap(lambda key: nn.ValueEmbedding(vocab=9, kv_heads=2, head_dim=4, key=key))
    tables["layers"] = layers(jax.random.split(KEY, 3))
    marked = nn.matrices(tables)
    assert marked["values"].weight == marked["pairs"].weight == Matrix(0, 1, 2, table=True)
    assert marked["layers"].weight == Matrix(1, 1, 2, table=True)
    # The control: a vector has one dim by default.
    table_mark = nn.matrices(nn.Embedding(vocab=9, embed=6, key=KEY)).weight
    assert table_mark == Matrix(0, 1, 1, table=True)
