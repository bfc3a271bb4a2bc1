"""Small models to lay out over meshes: three families, and what is in none of them, with numbers of numpy's drawing."""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from foreign import Fading, Int8Map

from eqformer import Batch, models, nn
from eqformer.parallel import make_mesh, Plan


CORE = nn.BlockwiseCore(block=8)
EMBED, HEADS, HEAD_DIM, MLP = 32, 8, 4, 48
FAMILIES: dict[str, Any] = {
    # The axis `tensor` divides neither 50 nor 2.
    "gpt2": models.GPT2Config(vocab=50, embed=EMBED, layers=4, heads=HEADS, max_seq=32, mlp=MLP, dropout=0.1),
    "llama": models.LlamaConfig(
        vocab=48, embed=EMBED, layers=4, heads=HEADS, kv_heads=2, head_dim=HEAD_DIM, mlp=MLP, bias=True
    ),
    "jaxformer": models.JAXformerConfig(
        vocab=64,
        embed=EMBED,
        blocks=4,
        layers_per_block=2,
        heads=HEADS,
        latent=16,
        rope_dim=4,
        mlp=MLP,
        dropout=0.1,
    ),
    "tied": models.LlamaConfig(vocab=50, embed=EMBED, layers=2, heads=HEADS, kv_heads=1, mlp=MLP, tied=True),
    "long": models.LlamaConfig(
        vocab=48,
        embed=EMBED,
        layers=2,
        heads=HEADS,
        kv_heads=4,
        mlp=MLP,
        scaling=nn.DynamicScaling(factor=4.0, original_length=6),
    ),
    "five layers": models.LlamaConfig(
        vocab=48, embed=EMBED, layers=5, heads=HEADS, kv_heads=2, head_dim=HEAD_DIM, mlp=MLP
    ),
    "rows of 256": models.GPT2Config(vocab=50, embed=EMBED, layers=2, heads=4, max_seq=256, mlp=MLP),
}
CORES = {"rows of 256": nn.ReferenceCore()}  # which takes no steps of eight tokens


def attention(key: Any, **options: Any) -> nn.Attention:
    """An attention of the sizes above with rotary positions."""
    rotary = nn.Rotary(HEAD_DIM, 1e4)
    options = {"kv_heads": 4, "core": CORE, "rotary": rotary, **options}
    return nn.Attention(embed=EMBED, heads=HEADS, head_dim=HEAD_DIM, key=key, **options)


def norm(offset: float = 0.0) -> nn.RMSNorm:
    """A norm of the stream."""
    return nn.RMSNorm("embed", embed=EMBED, offset=offset)


def windows(key: Any) -> nn.Period:
    """Like gpt-oss: sinks and biases, windows and whole rows in turn, clamped gates; and dropout."""

    def block(mask: nn.Mask, key: Any) -> nn.Block:
        one, two = jax.random.split(key)
        mixer = attention(one, mask=mask, sinks=True, bias=True)
        gated = nn.GatedMLP(embed=EMBED, mlp=MLP, bias=True, limit=2.0, key=two)
        return nn.Block(
            nn.Residual(mixer, norm(), dropout=nn.Dropout(0.1)), nn.Residual(gated, norm(), dropout=nn.Dropout(0.1))
        )

    return nn.Period(tuple(map(block, (nn.sliding_window(5), nn.causal()), jax.random.split(key))))


def full_norms(key: Any) -> nn.Block:
    """Like OLMo 2: queries and keys normalised over all their heads together, norms behind the layers."""
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
    """Norms without arrays, of which no layout says whether they are split."""
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
    """Two key heads, normalised together."""
    one, two = jax.random.split(key)
    norms = {"key_norm": nn.RMSNorm("kv_heads head_dim", kv_heads=2, head_dim=HEAD_DIM)}
    return nn.Block(
        nn.Residual(attention(one, kv_heads=2, **norms), norm()),
        nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm()),
    )


def side_by_side(key: Any) -> nn.ParallelBlock:
    """Both layers on one input, whose norm they share; gated heads, one key head, norms within each head."""
    one, two = jax.random.split(key)
    # Four numbers whose deviation may be tiny: the larger eps keeps their norm from magnifying rounding.
    norms = {n: nn.LayerNorm("head_dim", head_dim=HEAD_DIM, eps=0.1) for n in ("query_norm", "key_norm")}
    mlp = nn.MLP(embed=EMBED, mlp=MLP, bias=True, key=two)
    mixer = attention(one, kv_heads=1, gate=True, output_bias=True, **norms)
    return nn.ParallelBlock(
        nn.Residual(mixer, dropout=nn.Dropout(0.2)),
        nn.Residual(mlp, dropout=nn.Dropout(0.2)),
        norm=nn.LayerNorm("embed", embed=EMBED),
    )


def sublayers(key: Any) -> nn.Period:
    """A mixer with no feed-forward layer behind it, then three layers beside the stream by themselves."""
    one, two, three, four = jax.random.split(key, 4)
    alone = nn.Block(nn.Residual(attention(one, mask=nn.sliding_window(5)), norm(), dropout=nn.Dropout(0.1)))
    layers = attention(two), nn.MLP(embed=EMBED, mlp=MLP, key=three), nn.GatedMLP(embed=EMBED, mlp=MLP, key=four)
    return nn.Period((alone, *(nn.Residual(layer, norm(), dropout=nn.Dropout(0.1)) for layer in layers)))


def latents(key: Any) -> nn.Block:
    """Like DeepSeek-V2: queries from a latent of their own, latents normalised, biases everywhere."""
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
    """Eight experts of which a token takes two, with biases, balanced row by row."""
    one, two, three = jax.random.split(key, 3)
    options = {"router": nn.TopKRouter(embed=EMBED, experts=8, top_k=2, normalise=True, jitter=0.1, key=two), **options}
    make = lambda key: nn.GatedMLP(embed=EMBED, mlp=16, bias=True, key=key)
    losses = losses or (nn.LoadBalance(0.5, per="sequence"), nn.RouterZ(0.1))
    mixer = options.pop("mixer", attention(one))
    moe = nn.MoE(options.pop("router"), nn.Experts(make, 8, key=three), losses=losses, **options)
    return nn.Block(nn.Residual(mixer, norm()), nn.Residual(moe, norm()))


def weighed_inputs(key: Any) -> nn.Period:
    """Like Llama 4: chunks of rows and whole ones in turn, the latter sharpened, and sigmoids that weigh inputs."""
    one, two = jax.random.split(key)
    router = nn.TopKRouter(embed=EMBED, experts=8, top_k=2, score="sigmoid", key=two)
    mixers = attention(one, mask=nn.chunked(5)), attention(one, rotary=None, temperature=nn.LogTemperature(3, 0.5))
    balance = nn.LoadBalance(0.5, per="sequence", normalise=True)
    options = {"router": router, "weighs_inputs": True}
    return nn.Period(tuple(mixture(two, balance, mixer=mixer, **options) for mixer in mixers))


def shared_mixture(key: Any) -> nn.Period:
    """Like DeepSeek: dense and routed layers in turn, sigmoid scores in groups, a bias, a shared expert, slots."""
    one, two, three, four = jax.random.split(key, 4)
    router = nn.TopKRouter(
        embed=EMBED, experts=8, top_k=2, score="sigmoid", normalise=True, scale=1.5, groups=4, kept_groups=2, key=one
    )
    router = eqx.tree_at(lambda r: r.selection_bias, router, jnp.linspace(-0.2, 0.2, 8), is_leaf=lambda x: x is None)
    shared = nn.GatedShared(nn.GatedMLP(embed=EMBED, mlp=16, bias=True, key=two), embed=EMBED, key=two)
    balance = nn.LoadBalance(0.5, per="sequence", normalise=True)
    routed = mixture(three, balance, router=router, shared=shared, dispatch=nn.Capacity(0.75))
    return nn.Period((full_norms(four), routed))


def batch_mixture(key: Any) -> nn.Block:
    """Balanced over all the rows of a batch; noise in the choice, and losses that are not sums over tokens."""
    router = nn.NoisyTopKRouter(embed=EMBED, experts=8, top_k=2, std=0.2, key=key)
    return mixture(key, nn.LoadBalance(0.5), nn.Importance(0.3), nn.NoisyLoad(0.3), router=router)


def choosing_experts(key: Any) -> nn.Block:
    """Experts that choose their tokens."""
    one, two, three = jax.random.split(key, 3)
    router = nn.ExpertChoiceRouter(embed=EMBED, experts=8, factor=2.0, key=two)
    experts = nn.Experts(lambda key: nn.MLP(embed=EMBED, mlp=16, bias=True, key=key), 8, key=three)
    return nn.Block(nn.Residual(attention(one), norm()), nn.Residual(nn.MoE(router, experts), norm()))


def recurrence(key: Any, kv_heads: int = 4) -> nn.Period:
    """Like Qwen3-Next: a gated delta net, and an attention whose heads have gates, under norms that count from one."""
    one, two = jax.random.split(key)
    sizes = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "v_dim": 6}
    net = nn.GatedDeltaNet(embed=EMBED, **sizes, chunk=5, key=one)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    mixers = net, attention(two, kv_heads=kv_heads, gate=True)
    return nn.Period(
        tuple(
            nn.Block(
                nn.Residual(mixer, norm(1.0), dropout=nn.Dropout(0.1)),
                nn.Residual(mlp, norm(1.0), dropout=nn.Dropout(0.1)),
            )
            for mixer in mixers
        )
    )


def fading(key: Any, splits: bool = True) -> nn.Period:
    """A mixer of somebody's own without a feed-forward layer, and an attention with one."""
    one, two = jax.random.split(key)
    mixer = Fading(embed=EMBED, heads=HEADS, v_dim=6, splits=splits, key=one)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    alone = nn.Block(nn.Residual(mixer, norm(), dropout=nn.Dropout(0.1)))
    return nn.Period((alone, nn.Block(nn.Residual(attention(two), norm()), nn.Residual(mlp, norm()))))


Make = Callable[[Any], Any]
BLOCKS: dict[str, tuple[Make, ...]] = {
    "windows": (windows,),
    "full norms": (full_norms,),
    "bare norms": (bare_norms,),
    "few full norms": (few_full_norms,),
    "side by side": (side_by_side,),
    "sublayers": (sublayers,),
    "latents": (latents,),
    "unlike stacks": (latents, side_by_side),
    "dense, then mixtures": (latents, shared_mixture),
    "mixture": (mixture,),
    "shared mixture": (shared_mixture,),
    "weighed inputs": (weighed_inputs,),
    "batch mixture": (batch_mixture,),
    "choosing experts": (choosing_experts,),
    "recurrence": (recurrence,),
    "fading": (fading,),
    "whole fading": (functools.partial(fading, splits=False),),
    "few recurrence": (functools.partial(recurrence, kv_heads=2),),
}


# How many layers of each kind, where these are not four.
DEPTHS = {"dense, then mixtures": (1, 5)}


def of_blocks(*makes: Make, depths: tuple[int, ...] | None = None, remat: str = "none") -> nn.Transformer:
    """Stacks of such layers, by default of four each, between a scaled embedding and a head with a bias."""
    keys, vocab = jax.random.split(jax.random.key(0), 3), 50
    depths = depths or (4,) * len(makes)
    return nn.Transformer(
        nn.Embedding(vocab=vocab, embed=EMBED, scale=2.0, key=keys[0]),
        tuple(nn.run_with(nn.Stack(make, n, key=keys[1]), remat=remat) for make, n in zip(makes, depths, strict=True)),
        norm(),
        nn.Linear("embed -> vocab", embed=EMBED, vocab=vocab, bias=True, key=keys[2]),
        dropout=nn.Dropout(0.1),
    )


def filled(build: Callable[[], Any], seed: int = 0) -> Any:
    """What `build()` would give, with numpy's numbers: no weight is zero, no norm the identity."""
    draw = np.random.default_rng(seed)

    def number(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.arange(leaf.shape[0], dtype=leaf.dtype)
        fan_in = np.sqrt(leaf.shape[-1]) if leaf.ndim > 2 else 4.0
        return jnp.asarray(("norm" in jax.tree_util.keystr(path)) + draw.normal(size=leaf.shape) / fan_in, leaf.dtype)

    shapes = eqx.filter_eval_shape(build)
    with jax.ensure_compile_time_eval():  # a model is kept for all tests, whatever is being traced when it is made
        return jax.tree_util.tree_map_with_path(number, shapes)


@functools.cache
def model_of(name: str, remat: str = "none", dtypes: tuple[str, str] = ("float32", "float32")) -> nn.Transformer:
    """A small model by its name, filled; `dtypes` are those of parameters and of computation.

    Of a name that ends in `int8` every map is somebody's own, of eight bits; of one in `lora` every map has one.
    """
    if name.endswith(" int8"):
        with jax.ensure_compile_time_eval():
            return nn.map_linears(Int8Map.of, model_of(name.removesuffix(" int8"), remat, dtypes))
    plain = name.removesuffix(" lora")

    def build() -> nn.Transformer:
        if plain in BLOCKS:
            model = of_blocks(*BLOCKS[plain], depths=DEPTHS.get(plain), remat=remat)
        else:
            model = models.build(FAMILIES[plain], key=jax.random.key(0))
            model = nn.run_with(model, core=CORES.get(plain, CORE), remat=remat)
        return model if plain == name else nn.with_lora(model, [nn.Linear], rank=3, alpha=0.3, key=jax.random.key(1))

    with jax.ensure_compile_time_eval():
        return nn.Precision(*dtypes).apply(filled(build))


def batch_of(model: nn.Transformer, rows: int = 8, seq: int = 16, seed: int = 0) -> Batch:
    """Packed rows: two documents and padding in each, cut at unlike places, with unequal weights."""
    draw = np.random.default_rng(seed)
    cut = draw.integers(2, seq - 4, rows)
    end = seq - draw.integers(0, 3, rows)
    place = np.arange(seq)
    second = (place >= cut[:, None]) & (place < end[:, None])
    positions = np.where(place < cut[:, None], place, np.where(second, place - cut[:, None], -1))
    segments = np.where(place < cut[:, None], 0, np.where(second, 1, 2))
    ids, targets = draw.integers(0, model.vocab, (2, rows, seq))
    weights = draw.integers(0, 2, (rows, seq)) * (positions >= 0)
    return Batch(
        ids=ids.astype(np.int32),
        targets=targets.astype(np.int32),
        weights=weights.astype(np.float32),
        positions=positions.astype(np.int32),
        segments=segments.astype(np.int32),
        examples=np.arange(rows, dtype=np.int32),
    )


def plan_over(mesh: dict[str, int], **choices) -> Plan:
    """A plan over the first devices."""
    return Plan(make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())]), **choices)


def shapes(build) -> nn.Transformer:
    """A model's shapes alone."""
    return eqx.filter_eval_shape(build)
