"""Models that a mesh cannot split raise one error each, and similar models that fit do not."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest
from context_cases import Unknown
from jaxtyping import Array, Float
from plan_models import model_of, of_blocks, plan_over, shapes
from plan_parts import attention, EMBED, HEAD_DIM, HEADS, MLP, norm

from eqformer import kernels, nn


def built(**options) -> nn.Transformer:
    """Four layers of an attention with these options and a feed-forward layer."""
    options = {"core": kernels.DotProductAttention(), **options}

    def block(key):
        mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=key)
        return nn.Block(nn.Residual(attention(key, **options), norm()), nn.Residual(mlp, norm()))

    return shapes(lambda: of_blocks(block))


def two_stacks() -> nn.Transformer:
    """A model of unlike layers."""
    model = built()
    return eqx.tree_at(lambda m: m.stacks, model, (*model.stacks, *built(kv_heads=2).stacks))


class Arranged(nn.Layer):
    """An arrangement of one's own, with an array that has the name of a dim that is split."""

    sublayer: nn.Residual
    amounts: Float[Array, "mlp"]

    def __call__(self, x, tokens=None, cache=None):
        x, cache, aux = self.sublayer(x, tokens, cache)
        return x * jnp.mean(self.amounts), cache, aux

    def init_cache(self, *args):
        return self.sublayer.init_cache(*args)


def arranged() -> nn.Transformer:
    """A model of these."""
    return shapes(lambda: of_blocks(lambda key: Arranged(nn.Residual(attention(key), norm()), jnp.ones(MLP))))


def key_norms(kv_heads: int) -> nn.Transformer:
    """A model that normalises all key heads together."""
    key_norm = nn.RMSNorm("kv_heads head_dim", kv_heads=kv_heads, head_dim=HEAD_DIM)
    return built(kv_heads=kv_heads, key_norm=key_norm)


def selecting(query_norm: nn.Norm | None) -> nn.Transformer:
    """A model whose indexers read the input or, as in Mistral Large 4, a norm of the input."""

    def block(key):
        indexer = nn.Indexer(
            embed=EMBED, q_latent=None, heads=3, dim=6, top_k=2, rotary=None, query_norm=query_norm, key=key
        )
        sizes: dict[str, Any] = {"embed": EMBED, "heads": HEADS, "head_dim": HEAD_DIM, "latent": 16}
        latent_norm = nn.RMSNorm("latent", latent=16)
        return nn.Block(
            nn.Residual(nn.LatentAttention(**sizes, latent_norm=latent_norm, indexer=indexer, key=key), norm())
        )

    return shapes(lambda: of_blocks(block))


def bare(x):
    """A norm that is no module of `nn`."""
    return x / (1 + jnp.mean(jnp.square(x), axis=-1, keepdims=True))


def bare_norm() -> nn.Transformer:
    """A model with that norm."""
    mlp = lambda key: nn.GatedMLP(embed=EMBED, mlp=MLP, key=key)
    return shapes(
        lambda: of_blocks(lambda key: nn.Block(nn.Residual(attention(key), norm()), nn.Residual(mlp(key), bare)))
    )


def mixed(expert=None, router=None, **options):
    """A model whose feed-forward layers are mixtures, of experts with two maps by default."""
    expert = expert or (lambda key: nn.MLP(embed=EMBED, mlp=16, key=key))
    router = router or (lambda key: nn.TopKRouter(embed=EMBED, experts=8, top_k=2, key=key))

    def block(key):
        return nn.Block(
            nn.Residual(attention(key), norm()),
            nn.Residual(nn.MoE(router(key), nn.Experts(expert, 8, key=key), **options), norm()),
        )

    return lambda: shapes(lambda: of_blocks(block))


class OwnNames(eqx.Module):
    """An expert whose hidden dim has a name that no layout knows, and perhaps a parameter that is no map's."""

    up: nn.Linear
    down: nn.Linear
    gain: Float[Array, "embed"] | None

    def __init__(self, key, dim="hidden", gain=False):
        sizes: dict[str, Any] = {"embed": EMBED, dim: 16}
        self.up = nn.Linear(f"embed -> {dim}", **sizes, key=key)
        self.down = nn.Linear(f"{dim} -> embed", **sizes, key=key)
        self.gain = jnp.ones(EMBED) if gain else None

    def __call__(self, x):
        return self.down(self.up(x)) * (1 if self.gain is None else self.gain)


def gained(key):
    return OwnNames(key, "mlp", gain=True)


def recurrent():
    return shapes(lambda: model_of("few recurrence"))


def spaced():
    return shapes(lambda: model_of("state space of two"))


def choosing(per):
    return lambda key: nn.ExpertChoiceRouter(embed=EMBED, experts=8, factor=1.0, per=per, key=key)


FEW, WHOLE_BATCH = nn.Capacity(3.9), nn.Capacity(1.0, per="batch")
MODELS = {
    "experts whose hidden dim stays whole": (
        mixed(OwnNames),
        {"tensor": 2},
        {},
        r"the axis splits no dim.* name .* `mlp`",
    ),
    "nothing: the same over other axes": (mixed(OwnNames), {"fsdp": 2, "expert": 2}, {}, None),
    "split experts that are more than maps": (
        mixed(gained, dispatch=FEW),
        {"expert": 2},
        {},
        r"parameters outside of linear maps",
    ),
    "nothing: the same whole": (mixed(gained, dispatch=FEW), {"fsdp": 2, "pipe": 2}, {}, None),
    "slots of pieces of rows": (mixed(dispatch=FEW), {"context": 2}, {}, r"has a Capacity, .* whole rows"),
    "nothing: slots for all": (mixed(dispatch=nn.Capacity(4.0)), {"context": 2}, {}, None),
    "slots of a part of the batch": (mixed(dispatch=WHOLE_BATCH), {"fsdp": 2}, {}, r"has a Capacity, .* whole batch"),
    "nothing: slots of the whole batch": (mixed(dispatch=WHOLE_BATCH), {"tensor": 2}, {}, None),
    "experts that choose in pieces of rows": (
        mixed(router=choosing("sequence")),
        {"context": 2},
        {},
        r"has an ExpertChoiceRouter, .* whole rows",
    ),
    "experts that choose in a part of the batch": (
        mixed(router=choosing("batch")),
        {"expert": 2},
        {},
        r"has an ExpertChoiceRouter, .* whole batch",
    ),
    "a recurrence over pieces of rows": (
        recurrent,
        {"context": 2},
        {},
        r"blocks\.blocks\[0\].sublayers\[0\].layer has a GatedDelta",
    ),
    "nothing: a recurrence over heads": (recurrent, {"fsdp": 2, "tensor": 4}, {}, None),
    "groups to norm on several devices": (
        spaced,
        {"tensor": 4},
        {},
        r"has 2 key heads, and a norm over all query heads .* divides 2",
    ),
    "nothing: whole groups": (spaced, {"tensor": 2}, {}, None),
    "a Mamba-2 over pieces of rows": (spaced, {"context": 2}, {}, r"has a Mamba2Mixer, which needs whole rows"),
    "few key heads to convolve": (
        recurrent,
        {"tensor": 4},
        {"residual": "feature"},
        r"has 2 key heads, .*query_conv.*, .*key_conv",
    ),
    "an indexer of a norm of some tokens": (
        lambda: selecting(nn.LayerNorm("embed", embed=EMBED)),
        {"tensor": 2},
        {"residual": "sequence"},
        r"layer is a LatentAttention with a projection of an array .* use residual='replicated' or 'feature'",
    ),
    "nothing: an indexer of a norm of some features": (
        lambda: selecting(nn.LayerNorm("embed", embed=EMBED)),
        {"tensor": 2},
        {"residual": "feature"},
        None,
    ),
    "nothing: an indexer of the input": (lambda: selecting(None), {"tensor": 2}, {"residual": "sequence"}, None),
    "nothing: a norm of one's own": (bare_norm, {"tensor": 2}, {"residual": "sequence"}, None),
    "a norm of one's own that would see slices": (
        bare_norm,
        {"tensor": 2},
        {"residual": "feature"},
        r"feature'\) over tensor=2: .*sublayers\[1\]\.norm is a function, which would get a slice",
    ),
    "experts that an axis does not divide": (
        lambda: shapes(lambda: model_of("mixture")),
        {"expert": 3},
        {},
        r"splits dim 'experts' over axis 'expert', but .* has size 8 in .* and the axis has 3 devices; .*: 1, 2, 4, 8",
    ),
    "a dim that an axis does not divide": (
        built,
        {"tensor": 3},
        {},
        r"splits dim '(mlp|heads)' over axis 'tensor', but the dim has size (48|8) in .* and the axis has 3",
    ),
    "unlike stacks in a pipeline": (two_stacks, {"pipe": 8}, {}, None),
    "layers left over": (built, {"pipe": 3}, {}, None),
    "more stages than layers": (
        built,
        {"pipe": 8},
        {},
        r"layers=4, stages=8.*more parts than layers; take 8 layers or more",
    ),
    "more chunks than layers": (
        built,
        {"pipe": 2},
        {"schedule": "looping", "chunks": 4, "microbatches": 2},
        r"layers=4, stages=2, chunks=4.*take 8 layers",
    ),
    "a module that no transform knows": (
        arranged,
        {"tensor": 2},
        {},
        r"tensor=2: .*blocks\.amounts would be split by the names of its dims, but no transform knows",
    ),
    "all few key heads normalised in a feature stream": (
        lambda: key_norms(2),
        {"tensor": 4},
        {"residual": "feature"},
        r"residual='feature'\) over tensor=4: .*sublayers\[0\].layer has 2 key heads, .*key_norm.weight belongs to all",
    ),
    "key heads that no group shares": (
        lambda: shapes(lambda: of_blocks(three_of_six)),
        {"tensor": 2},
        {},
        r"tensor=2: .*sublayers\[0\].* has 3 key heads, which neither split over 2 devices nor are shared",
    ),
    "nothing: heads that just split": (built, {"context": 4, "tensor": 2}, {"context_method": "heads"}, None),
    "too few heads for context": (
        lambda: shapes(lambda: of_blocks(three_of_six)),
        {"context": 4},
        {"context_method": "heads"},
        r"context=4: .*sublayers\[0\].*: .*6 query heads on a device do not split over 4 devices",
    ),
    "key heads that fit no device": (
        lambda: shapes(lambda: of_blocks(three_of_six)),
        {"context": 2},
        {"context_method": "heads"},
        r"context=2: .*3 key heads on a device are neither a multiple nor a divisor",
    ),
    "a core that the ring does not know": (
        lambda: built(core=Unknown()),
        {"context": 2},
        {},
        r"context=2: .*method='ring'\): the ring combines",
    ),
    "sinks in a core without": (
        lambda: built(scores=nn.Scores(sinks=jnp.zeros(HEADS))),
        {"context": 2},
        {"context_method": "gather"},
        r"context=2: .*does not support sinks",
    ),
}


def three_of_six(key):
    """A layer with six heads and three key heads."""
    mixer = nn.Attention(
        embed=EMBED, heads=6, kv_heads=3, head_dim=HEAD_DIM, core=kernels.DotProductAttention(), key=key
    )
    return nn.Block(nn.Residual(mixer, norm()), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=key), norm()))


@pytest.mark.parametrize("name", MODELS)
def test_models_that_a_mesh_cannot_split(name):
    make, mesh, choices, message = MODELS[name]
    over = plan_over(mesh, **choices)
    if message is None:  # the neighbour of a case that fails, and fits
        over.check(make(), rows=24, seq=48)
        return
    with pytest.raises(ValueError, match=message):
        over.check(make(), rows=24, seq=48)


def test_tokens_that_choose_in_a_stream_of_features_fall_into_pieces():
    over = plan_over({"tensor": 2}, residual="feature")
    over.check(shapes(lambda: model_of("llama")), rows=8, seq=15)
    with pytest.raises(
        ValueError, match=r"feature'\) over tensor=2: the 15 tokens .* where they are routed; .*of 2 tokens"
    ):
        over.check(mixed()(), rows=8, seq=15)
