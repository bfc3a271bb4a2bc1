"""Blocks for the tests of plans: kinds of blocks that few or no published models have, and users' own blocks."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from extending import beside
from plan_parts import attention, CORE, EMBED, HEAD_DIM, HEADS, MLP, norm
from plan_recurrences import channel_recurrence, mixers_side_by_side, recurrence, short_convolutions, state_space

from eqformer import kernels, nn


Cosine: Any = beside("cosine").Cosine
Fading: Any = beside("fading").Fading
Int8Map: Any = beside("eight_bits").Int8Map
ReZero: Any = beside("rezero").ReZero


def windows(key: Any) -> nn.SuperBlock:
    """Like gpt-oss: sinks, biases, a window in every second layer, clamped gates; dropout besides."""

    def block(mask: nn.Mask, key: Any) -> nn.Block:
        one, two = jax.random.split(key)
        mixer = attention(one, mask=mask, scores=nn.Scores(sinks=jnp.zeros(HEADS)), bias=True)
        gated = nn.GatedMLP(embed=EMBED, mlp=MLP, bias=True, limit=2.0, key=two)
        return nn.Block(
            nn.Residual(mixer, norm(), dropout=nn.Dropout(0.1)), nn.Residual(gated, norm(), dropout=nn.Dropout(0.1))
        )

    return nn.SuperBlock(tuple(map(block, (nn.sliding_window(5), nn.causal()), jax.random.split(key))))


def full_norms(key: Any) -> nn.Block:
    """Like OLMo 2: queries and keys normalised over all heads together, and norms on the outputs of the layers."""
    one, two = jax.random.split(key)
    norms = {
        "query_norm": nn.RMSNorm("heads head_dim", heads=HEADS, head_dim=HEAD_DIM),
        "key_norm": nn.RMSNorm("kv_heads head_dim", kv_heads=4, head_dim=HEAD_DIM),
    }
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    return nn.Block(
        nn.Residual(attention(one, **norms), output_norm=norm()),
        nn.Residual(mlp, output_norm=norm()),
    )


def bare_norms(key: Any) -> nn.Block:
    """Norms without arrays: no layout of a scale or bias tells whether their features are split."""
    one, two = jax.random.split(key)
    norms = {
        "query_norm": nn.RMSNorm("heads head_dim", scale=False, heads=HEADS, head_dim=HEAD_DIM),
        "key_norm": nn.RMSNorm("kv_heads head_dim", scale=False, kv_heads=4, head_dim=HEAD_DIM),
    }
    bare = nn.LayerNorm("embed", embed=EMBED, scale=False, bias=False)
    return nn.Block(
        nn.Residual(attention(one, **norms), bare), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), bare)
    )


def few_full_norms(key: Any) -> nn.Block:
    """Two key heads, normalised together: fewer heads than devices."""
    one, two = jax.random.split(key)
    norms = {"key_norm": nn.RMSNorm("kv_heads head_dim", kv_heads=2, head_dim=HEAD_DIM)}
    return nn.Block(
        nn.Residual(attention(one, kv_heads=2, **norms), norm()),
        nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm()),
    )


def side_by_side(key: Any) -> nn.ParallelResidual:
    """Attention and MLP on one input with one norm; gated heads, one key head, norms within each head, and an
    activation with parameters."""
    one, two = jax.random.split(key)
    # A head's four numbers may have a tiny deviation: with a small eps the norm would magnify rounding.
    norms = {n: nn.LayerNorm("head_dim", head_dim=HEAD_DIM, eps=0.1) for n in ("query_norm", "key_norm")}
    mlp = nn.MLP(embed=EMBED, mlp=MLP, bias=True, activation=nn.XIELU(), key=two)
    mixer = attention(one, kv_heads=1, gate=True, output_bias=True, **norms)
    return nn.ParallelResidual(
        (nn.Residual(mixer, dropout=nn.Dropout(0.2)), nn.Residual(mlp, dropout=nn.Dropout(0.2))),
        norm=nn.LayerNorm("embed", embed=EMBED),
    )


def sublayers(key: Any) -> nn.SuperBlock:
    """A block of only a mixer, then three single residual layers that stand in no block."""
    one, two, three, four = jax.random.split(key, 4)
    alone = nn.Block(nn.Residual(attention(one, mask=nn.sliding_window(5)), norm(), dropout=nn.Dropout(0.1)))
    layers = attention(two), nn.MLP(embed=EMBED, mlp=MLP, key=three), nn.GatedMLP(embed=EMBED, mlp=MLP, key=four)
    return nn.SuperBlock((alone, *(nn.Residual(layer, norm(), dropout=nn.Dropout(0.1)) for layer in layers)))


def latents(key: Any) -> nn.Block:
    """Like DeepSeek-V2: queries from their own latent, both latents normalised; biases everywhere."""
    one, two = jax.random.split(key)
    mixer = nn.LatentAttention(
        embed=EMBED,
        heads=HEADS,
        head_dim=HEAD_DIM,
        latent=16,
        q_latent=8,
        latent_norm=nn.RMSNorm("latent", latent=16),
        query_latent_norm=nn.RMSNorm("q_latent", q_latent=8),
        rotary=nn.Rotary(4, 1e4, interleaved=True),
        bias=True,
        core=CORE,
        key=one,
    )
    return nn.Block(nn.Residual(mixer, norm(1.0)), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm(1.0)))


def mixture(key: Any, *losses: nn.BalanceLoss, **options: Any) -> nn.Block:
    """Eight experts with biases; a token takes two of them, and a balance loss is computed for each row."""
    one, two, three = jax.random.split(key, 3)
    options = {"router": nn.TopKRouter(embed=EMBED, experts=8, top_k=2, normalize=True, jitter=0.1, key=two), **options}
    width = options.pop("width", EMBED)
    make = lambda key: nn.GatedMLP(embed=width, mlp=16, bias=True, key=key)
    losses = losses or (nn.LoadBalance(0.5, per="sequence"), nn.RouterZ(0.1))
    mixer = options.pop("mixer", attention(one))
    moe = nn.MoE(options.pop("router"), nn.Experts(make, 8, key=three), losses=losses, **options)
    return nn.Block(nn.Residual(mixer, norm()), nn.Residual(moe, norm()))


def crowded(key: Any, **options: Any) -> nn.Block:
    """Eight experts whose router has a selection bias, for tests that make most tokens choose one device's experts."""
    router = nn.TopKRouter(embed=EMBED, experts=8, top_k=2, score="sigmoid", normalize=True, balanced=True, key=key)
    return mixture(key, router=router, **options)


def weighed_inputs(key: Any) -> nn.SuperBlock:
    """Like Llama 4: attention within chunks and, in every second layer, to whole rows with a temperature by position;
    sigmoid scores that weigh the experts' inputs."""
    one, two = jax.random.split(key)
    router = nn.TopKRouter(embed=EMBED, experts=8, top_k=2, score="sigmoid", key=two)
    mixers = (
        attention(one, mask=nn.chunked(5)),
        attention(one, rotary=None, scores=nn.Scores(temperature=nn.LogTemperature(3, 0.5))),
    )
    balance = nn.LoadBalance(0.5, per="sequence", normalize=True)
    options = {"router": router, "weighs_inputs": True}
    return nn.SuperBlock(tuple(mixture(two, balance, mixer=mixer, **options) for mixer in mixers))


def latent_experts(key: Any) -> nn.Block:
    """Experts on a latent with fewer channels, whose sum is normalized, beside a shared expert (Kimi K3)."""
    one, two, three, four = jax.random.split(key, 4)
    router = nn.TopKRouter(embed=EMBED, experts=8, top_k=2, score="sigmoid", key=one)
    sizes: dict[str, Any] = {"embed": EMBED, "latent": 12, "bias": True}
    maps: dict[str, Any] = {"to_latent": nn.Linear("embed -> latent", **sizes, key=two)}
    maps["from_latent"] = nn.Linear("latent -> embed", **sizes, key=three)
    maps["latent_norm"] = nn.RMSNorm("expert_latent", expert_latent=12)
    return mixture(four, router=router, shared=nn.MLP(embed=EMBED, mlp=16, key=two), width=12, **maps)


def shared_mixture(key: Any) -> nn.SuperBlock:
    """A block with a dense feed-forward layer, then a block with a mixture of experts."""
    one, two = jax.random.split(key)
    return nn.SuperBlock((full_norms(one), shared_experts(two)))


def shared_experts(key: Any) -> nn.Block:
    """Like DeepSeek: sigmoid scores, groups of experts, a selection bias and a shared expert; besides, a capacity."""
    one, two, three = jax.random.split(key, 3)
    router = nn.TopKRouter(
        embed=EMBED,
        experts=8,
        top_k=2,
        score="sigmoid",
        normalize=True,
        scale=1.5,
        groups=nn.ExpertGroups(4, 2),
        key=one,
    )
    router = eqx.tree_at(lambda r: r.selection_bias, router, jnp.linspace(-0.2, 0.2, 8), is_leaf=lambda x: x is None)
    shared = nn.GatedShared(nn.GatedMLP(embed=EMBED, mlp=16, bias=True, key=two), embed=EMBED, key=two)
    balance = nn.LoadBalance(0.5, per="sequence", normalize=True)
    return mixture(three, balance, router=router, shared=shared, dispatch=nn.Capacity(0.75))


def batch_mixture(key: Any) -> nn.Block:
    """A mixture balanced over all rows of a batch: noise in the choice, and losses that are not sums over tokens."""
    router = nn.NoisyTopKRouter(embed=EMBED, experts=8, top_k=2, std=0.2, key=key)
    return mixture(key, nn.LoadBalance(0.5), nn.Importance(0.3), nn.NoisyLoad(0.3), router=router)


class Bending(nn.FeedForward):
    """A user's own feed-forward layer, whose output is multiplied by a gate computed from each token."""

    up: nn.LinearMap
    down: nn.LinearMap
    amount: nn.LinearMap

    def __call__(self, x):
        """Map each token by itself."""
        return nn.multiply_float32(self.down(jnp.sin(self.up(x))), jax.nn.sigmoid(self.amount(x)))


class Centred(eqx.Module):
    """A user's layer that is no `FeedForward` and whose output depends on the mean of all of a token's features."""

    up: nn.LinearMap
    down: nn.LinearMap

    def __call__(self, x):
        """Map each token by itself."""
        return self.down(jnp.tanh(self.up(x - jnp.mean(x, -1, keepdims=True))))


def own_layers(key: Any) -> nn.SuperBlock:
    """A user's own layers: one that is split over devices, one without a splittable dimension, one of no contract."""

    def maps(key: Any, hidden: str) -> tuple[nn.Linear, nn.Linear]:
        one, two, sizes = *jax.random.split(key), {"embed": EMBED, hidden: MLP, "bias": True}
        return nn.Linear(f"embed -> {hidden}", **sizes, key=one), nn.Linear(f"{hidden} -> embed", **sizes, key=two)

    one, two, three, four = jax.random.split(key, 4)
    amounts = [nn.Linear("embed -> amount", embed=EMBED, amount=1, bias=True, key=key) for key in (two, three)]
    split, unsplit = Bending(*maps(two, "mlp"), amounts[0]), Bending(*maps(three, "hidden"), amounts[1])
    feeding = nn.Block(nn.Residual(attention(one), norm()), nn.Residual(split, norm()))
    return nn.SuperBlock((feeding, *(nn.Residual(layer, norm()) for layer in (unsplit, Centred(*maps(four, "mlp"))))))


def cosine(key: Any, rows: bool = False) -> nn.Block:
    """A mixture with a user's own router, which has an array outside its linear maps."""
    return mixture(key, router=Cosine(embed=EMBED, mlp=12, experts=8, rows=rows, key=key))


def choosing_experts(key: Any) -> nn.Block:
    """Experts that choose their tokens."""
    one, two, three = jax.random.split(key, 3)
    router = nn.ExpertChoiceRouter(embed=EMBED, experts=8, factor=2.0, key=two)
    experts = nn.Experts(lambda key: nn.MLP(embed=EMBED, mlp=16, bias=True, key=key), 8, key=three)
    return nn.Block(nn.Residual(attention(one), norm()), nn.Residual(nn.MoE(router, experts), norm()))


class WholeFading(Fading):
    """The mixer `Fading` with the default facts, which promise nothing."""

    def facts(self) -> nn.MixerFacts:
        """Return the default facts."""
        return nn.MixerFacts()


def fading(key: Any, mixer: type = Fading) -> nn.SuperBlock:
    """A block of only a user's own mixer, then a block of attention and a feed-forward layer."""
    one, two = jax.random.split(key)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    alone = nn.Block(nn.Residual(mixer(embed=EMBED, heads=HEADS, v_dim=6, key=one), norm(), dropout=nn.Dropout(0.1)))
    return nn.SuperBlock((alone, nn.Block(nn.Residual(attention(two), norm()), nn.Residual(mlp, norm()))))


def rezero(key: Any) -> nn.SuperBlock:
    """A user's own residual arrangement around attention, a feed-forward layer and a mixture of experts."""
    keys = jax.random.split(key, 3)
    routed: Any = mixture(keys[2]).feed_forward
    layers = attention(keys[0]), nn.GatedMLP(embed=EMBED, mlp=MLP, key=keys[1]), routed.layer
    sublayers = [nn.Residual(layer, norm(), dropout=nn.Dropout(0.1)) for layer in layers]
    return nn.SuperBlock(tuple(ReZero(sublayer, jnp.array(0.0, jnp.float32)) for sublayer in sublayers))


Make = Callable[[Any], Any]


def pairs(key: Any) -> nn.SuperBlock:
    """Two attention blocks: the second reads the keys and values of the first, and no later block does."""
    one, two, three = jax.random.split(key, 3)
    sizes = {"embed": EMBED, "heads": HEADS, "head_dim": HEAD_DIM, "kv_heads": 4, "rotary": nn.Rotary(HEAD_DIM, 1e4)}
    reading = nn.CrossLayerAttention(**sizes, core=CORE, bias=True, key=two)
    gated = nn.GatedMLP(embed=EMBED, mlp=MLP, key=three)
    first = nn.Block(nn.Residual(attention(one), norm(), shares="pair"))
    return nn.SuperBlock((first, nn.Block(nn.Residual(reading, norm(), reads="pair"), nn.Residual(gated, norm()))))


STREAMS = 3


def streams(key: Any, sublayers: Callable[[Any], nn.Block] | None = None) -> nn.Block:
    """Hyper-connections around both sublayers of a block: the mixer's mixes the streams, the other's does not."""
    one, two, three = jax.random.split(key, 3)
    gated = nn.Block(
        nn.Residual(attention(one), norm()), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm())
    )
    inner: Any = gated if sublayers is None else sublayers(one)
    sizes: dict[str, Any] = {"streams": STREAMS, "embed": EMBED, "key": three}
    mixer = nn.HyperConnection(inner.mixer, mixing=nn.Sinkhorn(4), **sizes)
    return nn.Block(mixer, nn.HyperConnection(inner.feed_forward, mixing=None, **sizes))


def ngrams(key: Any, smallest: int = 50) -> nn.Block:
    """A table of n-grams, whose vectors are added to all streams, before a feed-forward layer."""
    one, two, three = jax.random.split(key, 3)
    hash_ = nn.splitmix_hash(vocab=50, longest=3, heads=2, smallest=smallest, end_id=0)
    memory = nn.NGramMemory(hash_, embed=EMBED, streams=STREAMS, dim=4, divisor=8, taps=2, key=one)
    layer = nn.Residual(nn.MLP(embed=EMBED, mlp=MLP, key=two), norm())
    connection = nn.HyperConnection(layer, mixing=None, streams=STREAMS, embed=EMBED, key=three)
    return nn.Block(nn.Residual(memory), connection)


ENDS = 3
"""Sublayers of a block of attention residuals, so that every second block ends within a layer."""


def attention_residuals(key: Any, sublayers: Callable[[Any], nn.Block] | None = None) -> nn.Block:
    """Both sublayers of a block read a softmax over the sums of earlier blocks."""
    one, two = jax.random.split(key)
    gated = nn.Block(
        nn.Residual(attention(one), norm()), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm())
    )
    inner: Any = gated if sublayers is None else sublayers(one)
    sizes: dict[str, Any] = {"embed": EMBED, "block": ENDS}
    return nn.Block(*(nn.AttentionResidual(part, **sizes) for part in (inner.mixer, inner.feed_forward)))


def hashed(key: Any) -> nn.Block:
    """Experts chosen by the token's id, without a balance loss."""
    router = nn.HashRouter(embed=EMBED, experts=8, top_k=2, vocab=50, score="sigmoid", normalize=True, key=key)
    return mixture(key, nn.RouterZ(0.1), router=router)


def compressed(key: Any, block_size: int = 0, top_k: int = 0) -> nn.Block:
    """Like DeepSeek-V4: attention to a window and to compressed keys; with `top_k` an indexer selects among them."""
    one, two, three = jax.random.split(key, 3)
    sizes: dict[str, Any] = {"embed": EMBED, "block_size": block_size, "rotary": nn.Rotary(4, 1e4, interleaved=True)}
    compressor, indexer = None, None
    if block_size:
        compressor = nn.KeyCompressor(dim=8, series=2 if top_k else 1, **sizes, key=three)
    if top_k:
        small = nn.KeyCompressor(dim=6, series=2, **sizes, key=two)
        indexer = nn.EntryIndexer(small, embed=EMBED, q_latent=12, heads=16, top_k=top_k, key=three)
    mixer = nn.CompressedAttention(
        embed=EMBED,
        groups=2,
        group_heads=2,
        head_dim=8,
        q_latent=12,
        group_rank=5,
        window=5,
        rotary=sizes["rotary"],
        compressor=compressor,
        indexer=indexer,
        key=one,
    )
    mixer = eqx.tree_at(lambda m: m.sinks, mixer, jnp.linspace(-1, 1, 4, dtype=jnp.float32).reshape(2, 2))
    return nn.Block(nn.Residual(mixer, norm()), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm()))


def blocked(key: Any) -> nn.Block:
    """Like MiniMax-M3: for each query and key head an indexer selects the best blocks of keys."""
    one, two, three = jax.random.split(key, 3)
    norms = {f"{name}_norm": nn.RMSNorm("index_dim", index_dim=6) for name in ("query", "key")}
    sizes: dict[str, Any] = {"embed": EMBED, "kv_heads": 4, "rotary": nn.Rotary(4, 1e4)}
    indexer = nn.BlockIndexer(dim=6, block=3, top_k=2, **norms, **sizes, key=three)
    mixer = nn.BlockIndexedAttention(
        indexer, heads=HEADS, head_dim=HEAD_DIM, core=kernels.ReferenceAttention(), **sizes, key=one
    )
    return nn.Block(nn.Residual(mixer, norm()), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm()))


def pooled(key: Any) -> nn.SuperBlock:
    """Like GLM-5.3-Flash: latent attention to the pools of keys that an indexer selects; a second layer reads the
    first layer's choice."""
    first_key, second_key, last_key = jax.random.split(key, 3)
    sizes: dict[str, Any] = {"embed": EMBED, "heads": HEADS, "head_dim": HEAD_DIM, "latent": 16, "q_latent": 8}
    sizes |= {"latent_norm": nn.RMSNorm("latent", latent=16), "core": CORE}
    indexer = nn.PooledIndexer(embed=EMBED, q_latent=8, heads=3, dim=6, pool_size=3, top_k=2, key=last_key)
    first = nn.LatentAttention(**sizes, query_latent_norm=norm_of_queries(), indexer=indexer, key=first_key)
    second = nn.LatentAttention(**sizes, query_latent_norm=norm_of_queries(), key=second_key)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=last_key)
    choosing = nn.Block(nn.Residual(first, norm(), shares="choice"))
    return nn.SuperBlock((choosing, nn.Block(nn.Residual(second, norm(), reads="choice"), nn.Residual(mlp, norm()))))


def norm_of_queries() -> nn.RMSNorm:
    """Return the norm of the queries' latent."""
    return nn.RMSNorm("q_latent", q_latent=8)


BLOCKS: dict[str, tuple[Make, ...]] = {
    "blocked": (blocked,),
    "pooled": (pooled,),
    "compressed": (functools.partial(compressed, block_size=4),),
    "compressed and selected": (functools.partial(compressed, block_size=2, top_k=3),),
    "streams": (streams,),
    "n-grams": (ngrams,),
    "attention residuals": (attention_residuals,),
    "attention residuals of experts": (functools.partial(attention_residuals, sublayers=mixture),),
    "hashed": (hashed,),
    "streams of experts": (functools.partial(streams, sublayers=mixture),),
    "windows": (windows,),
    "full norms": (full_norms,),
    "bare norms": (bare_norms,),
    "few full norms": (few_full_norms,),
    "side by side": (side_by_side,),
    "sublayers": (sublayers,),
    "latents": (latents,),
    "unlike stacks": (latents, side_by_side),
    "dense, then mixtures": (full_norms, shared_experts),
    "mixture": (mixture,),
    "shared mixture": (shared_mixture,),
    "crowded": (crowded,),
    "crowded, weighed inputs": (functools.partial(crowded, weighs_inputs=True),),
    "weighed inputs": (weighed_inputs,),
    "latent experts": (latent_experts,),
    "batch mixture": (batch_mixture,),
    "choosing experts": (choosing_experts,),
    "own layers": (own_layers,),
    "cosine": (cosine,),
    "cosine rows": (functools.partial(cosine, rows=True),),
    "recurrence": (recurrence,),
    "mixers side by side": (mixers_side_by_side,),
    "short convolutions": (short_convolutions,),
    "channel recurrence": (channel_recurrence,),
    "pairs": (pairs,),
    "fading": (fading,),
    "whole fading": (functools.partial(fading, mixer=WholeFading),),
    "rezero": (rezero,),
    "few recurrence": (functools.partial(recurrence, kv_heads=2),),
    "state space": (state_space,),
    "state space of two": (functools.partial(state_space, kv_heads=2),),
    "state space of one": (functools.partial(state_space, kv_heads=1),),
}
