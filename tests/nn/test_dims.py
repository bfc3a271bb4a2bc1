"""The names of every dim of every leaf, against lists by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from eqformer import nn


KEY = jax.random.key(0)
ATTENTION = {
    "query.weight": "heads head_dim embed",
    "query.bias": "heads head_dim",
    "key.weight": "kv_heads head_dim embed",
    "key.bias": "kv_heads head_dim",
    "value.weight": "kv_heads head_dim embed",
    "value.bias": "kv_heads head_dim",
    "output.weight": "embed heads head_dim",
    "output.bias": "embed",
    "query_norm.weight": "head_dim",
    "key_norm.weight": "kv_heads head_dim",
    "gate.weight": "heads head_dim embed",
    "gate.bias": "heads head_dim",
    "scores.sinks": "heads",
}


def names(tree):
    """Path -> name of each string that `dims` put in place of an array."""
    found = jax.tree_util.tree_leaves_with_path(nn.dims(tree))
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in found if isinstance(leaf, str)}


def attention(**options):
    norms = dict(
        query_norm=nn.RMSNorm("head_dim", head_dim=4),
        key_norm=nn.RMSNorm("kv_heads head_dim", kv_heads=2, head_dim=4),
    )
    sizes = dict(embed=6, heads=4, kv_heads=2, head_dim=4, bias=True, gate=True, scores=nn.Scores(sinks=jnp.zeros(4)))
    return nn.Attention(**sizes, **norms, **options, key=KEY)


def latent_attention():
    return nn.LatentAttention(
        embed=6,
        heads=2,
        head_dim=4,
        latent=3,
        q_latent=5,
        v_dim=7,
        latent_norm=nn.RMSNorm("latent", latent=3, shift=True),
        query_latent_norm=nn.RMSNorm("q_latent", q_latent=5),
        rotary=nn.Rotary(2, 100.0),
        key=KEY,
    )


def block(key):
    norm = nn.LayerNorm("embed", embed=6)
    return nn.Block(
        nn.Residual(attention(), norm, dropout=nn.Dropout(0.1)),
        nn.Residual(nn.GatedMLP(embed=6, mlp=8, key=key), norm, dropout=nn.Dropout(0.1)),
    )


def transformer():
    return nn.Transformer(
        nn.Embedding(vocab=9, embed=6, key=KEY),
        (nn.Stack(block, 3, key=KEY),),
        nn.RMSNorm("embed", embed=6),
        nn.Linear("embed -> vocab", embed=6, vocab=9, key=KEY),
        positions=nn.LearnedPositions(max_seq=5, embed=6, key=KEY),
    )


MODULES = {
    "linear": (
        lambda: nn.Linear("embed -> heads head_dim", embed=3, heads=2, head_dim=4, bias=True, key=KEY),
        {"weight": "heads head_dim embed", "bias": "heads head_dim"},
    ),
    "embedding": (lambda: nn.Embedding(vocab=4, embed=2, key=KEY), {"weight": "vocab embed"}),
    "positions": (lambda: nn.LearnedPositions(max_seq=4, embed=2, key=KEY), {"weight": "max_seq embed"}),
    "rms norm": (lambda: nn.RMSNorm("embed", embed=3, shift=True), {"weight": "embed", "shift": "embed"}),
    "bare norm": (lambda: nn.RMSNorm("embed", embed=3, scale=False), {}),
    "layer norm": (lambda: nn.LayerNorm("mlp", mlp=3), {"weight": "mlp", "bias": "mlp"}),
    "attention": (attention, ATTENTION),
    "latent attention": (
        latent_attention,
        {
            "query_down.weight": "q_latent embed",
            "query_latent_norm.weight": "q_latent",
            "query.weight": "heads head_dim q_latent",
            "query_rope.weight": "heads rope_dim q_latent",
            "latent_down.weight": "latent embed",
            "latent_norm.weight": "latent",
            "latent_norm.shift": "latent",
            "key_rope.weight": "rope_dim embed",
            "key_up.weight": "heads head_dim latent",
            "value_up.weight": "heads v_dim latent",
            "output.weight": "embed heads v_dim",
        },
    ),
    "mlp": (
        lambda: nn.MLP(embed=3, mlp=4, bias=True, key=KEY),
        {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp", "down.bias": "embed"},
    ),
    "gated mlp": (
        lambda: nn.GatedMLP(embed=3, mlp=4, key=KEY),
        {"gate.weight": "mlp embed", "up.weight": "mlp embed", "down.weight": "embed mlp"},
    ),
    "kv cache": (
        lambda: attention().init_cache((2,), 5),
        {
            "keys": "batch kv_heads kv_seq head_dim",
            "values": "batch kv_heads kv_seq v_dim",
            "positions": "batch kv_seq",
        },
    ),
    "latent cache": (
        lambda: latent_attention().init_cache((2,), 5),
        {"latents": "batch kv_seq latent", "rotary_keys": "batch kv_seq rope_dim", "positions": "batch kv_seq"},
    ),
    "tokens": (lambda: nn.positions_like((2, 3)), {"positions": "batch seq"}),
}


@pytest.mark.parametrize("module", MODULES)
def test_every_leaf_of_every_module_has_its_names(module):
    make, expected = MODULES[module]
    assert names(eqx.filter_eval_shape(make)) == expected


def test_a_stack_adds_layers_in_front_and_only_to_its_own():
    found = names(eqx.filter_eval_shape(transformer))
    attention_leaves = {f"stacks[0].blocks.sublayers[0].layer.{k}": f"layers {v}" for k, v in ATTENTION.items()}
    norms = {f"stacks[0].blocks.{n}.{leaf}": "layers embed" for n in NORMS for leaf in ("weight", "bias")}
    feed_forward = {
        "stacks[0].blocks.sublayers[1].layer.gate.weight": "layers mlp embed",
        "stacks[0].blocks.sublayers[1].layer.up.weight": "layers mlp embed",
        "stacks[0].blocks.sublayers[1].layer.down.weight": "layers embed mlp",
    }
    rest = {
        "embedding.weight": "vocab embed",
        "stacks[0].numbers": "layers",
        "norm.weight": "embed",
        "head.weight": "vocab embed",
        "positions.weight": "max_seq embed",
    }
    assert found == attention_leaves | norms | feed_forward | rest


NORMS = ("sublayers[0].norm", "sublayers[1].norm")


def test_names_are_as_many_as_dims_and_the_structure_stays():
    model = eqx.filter_eval_shape(transformer)
    tree = nn.dims(model)
    assert jax.tree.structure(tree) == jax.tree.structure(model)
    for leaf, name in zip(jax.tree.leaves(model), jax.tree.leaves(tree), strict=True):
        assert not isinstance(leaf, jax.ShapeDtypeStruct) or len(name.split()) == leaf.ndim


def test_shapes_alone_have_the_same_names():
    make = lambda: (nn.MLP(embed=2, mlp=3, bias=True, key=KEY), nn.RMSNorm("embed", embed=2))
    shapes = eqx.filter_eval_shape(make)
    assert any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert names(shapes) == names(make()) != {}


def test_a_period_and_nested_ensembles():
    period = lambda key: nn.SuperBlock((block(key), block(key)))
    stack = eqx.filter_eval_shape(lambda: nn.Stack(period, 2, key=KEY))
    assert names(stack)["blocks.blocks[1].sublayers[0].layer.query.weight"] == "layers heads head_dim embed"

    class Experts(eqx.Module):
        each: nn.MLP = nn.ensemble("experts")

    class Layers(eqx.Module):
        each: Experts = nn.ensemble("layers")

    make = lambda key: nn.MLP(embed=2, mlp=3, key=key)
    layers = eqx.filter_vmap(eqx.filter_vmap(make))(jax.random.split(KEY, (4, 5)))
    assert names(Layers(Experts(layers)))["each.each.up.weight"] == "layers experts mlp embed"


class Foreign(eqx.Module):
    named: Float[Array, "embed mlp"]
    optional: Float[Array, "mlp"] | None
    fixed: Float[Array, "heads 3"]
    bare: jax.Array
    listed: list
    inner: eqx.nn.Linear
    label: str = eqx.field(static=True, default="x")


def test_foreign_modules_and_unannotated_arrays():
    zeros = jnp.zeros
    inner = eqx.nn.Linear(2, 3, key=KEY)
    module = Foreign(zeros((2, 3)), zeros(3), zeros((4, 3)), zeros((1, 2, 3)), [zeros(2), np.zeros(())], inner)
    assert names({"mine": (module,)}) == {
        "['mine'][0].named": "embed mlp",
        "['mine'][0].optional": "mlp",
        "['mine'][0].fixed": "heads _",
        "['mine'][0].bare": "_ _ _",
        "['mine'][0].listed[0]": "_",
        "['mine'][0].listed[1]": "",
        "['mine'][0].inner.weight": "_ _",
        "['mine'][0].inner.bias": "_",
    }


def test_optimizer_state_has_its_parameters_names():
    """The state's own containers are named tuples, which have no fields to annotate."""
    linear = nn.Linear("embed -> mlp", embed=2, mlp=3, key=KEY)
    found = names(optax.adam(1e-3).init(eqx.filter(linear, eqx.is_inexact_array)))
    assert found["[0].mu.weight"] == found["[0].nu.weight"] == "mlp embed"
    assert found["[0].count"] == ""


def test_an_annotation_that_does_not_fit_is_an_error_with_both_values():
    linear = nn.Linear("embed -> mlp", embed=2, mlp=3, key=KEY)
    wrong = eqx.tree_at(lambda m: m.weight, linear, jnp.zeros((4, 2, 3)))
    with pytest.raises(ValueError, match=r"weight has shape \(4, 2, 3\), but .* names the dims 'mlp embed'"):
        nn.dims(wrong)


def test_the_table_and_its_totals_by_hand():
    class Model(eqx.Module):
        embedding: nn.Embedding
        head: nn.Linear

    head = nn.Linear("embed -> mlp", embed=3, mlp=4, bias=True, key=KEY)
    model = Model(nn.Embedding(vocab=500, embed=3, key=KEY), nn.cast(head, "bfloat16"))
    rows = [line.split("  ") for line in nn.dims_table(model).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["path", "dims", "shape", "dtype", "bytes"]
    assert set(cells[1][0]) == {"-"}
    assert cells[2:] == [
        ["embedding.weight", "vocab embed", "500x3", "float32", "6,000"],
        ["head.weight", "mlp embed", "4x3", "bfloat16", "24"],
        ["head.bias", "mlp", "4", "bfloat16", "8"],
        ["total", "1,516", "6,032"],
    ]
    lines = nn.dims_table(model).splitlines()
    assert (
        len({line.rfind(figure) + len(figure) for line, figure in zip(lines[2:], ("6,000", "24", "8", "6,032"))}) == 1
    )
