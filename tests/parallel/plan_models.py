"""Small models and batches for the tests of plans; numpy draws the models' numbers, which compiles nothing."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haste import put
from plan_blocks import BLOCKS, ENDS, Int8Map, Make, STREAMS
from plan_parts import CORE, EMBED, HEAD_DIM, HEADS, MLP, norm

from eqformer import Batch, kernels, models, nn
from eqformer.parallel import make_mesh, Plan


FAMILIES: dict[str, Any] = {
    # Vocabularies of 50 and the two key heads of "llama" do not split evenly over four devices along `tensor`.
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
    "eight layers": models.LlamaConfig(vocab=48, embed=EMBED, layers=8, heads=HEADS, kv_heads=4, mlp=MLP),
    # Four periods of two layers: the second leaves its keys and values to the third and the fourth.
    "vectors of layers": models.Gemma4Config(
        vocab=48,
        embed=EMBED,
        layers=8,
        heads=HEADS,
        kv_heads=2,
        mlp=MLP,
        head_dim=HEAD_DIM,
        global_head_dim=8,
        global_kv_heads=2,
        window=5,
        window_layers=(0, 2, 4, 6),
        reading_layers=4,
        widens_reading=True,
        input_mlp=8,
        input_vocab=48,
        eps=1.0,
    ),
    "speedrun": models.SpeedrunConfig(
        vocab=50, embed=EMBED, layers=8, heads=HEADS, kv_heads=4, mlp=MLP, head_dim=HEAD_DIM, window=5, eps=0.1
    ),
    "values by id": models.SpeedrunConfig(
        vocab=50, embed=EMBED, layers=8, heads=HEADS, kv_heads=2, mlp=MLP, head_dim=HEAD_DIM, skips=False, eps=0.1
    ),
    "learned frequencies": models.MistralLarge4Config(
        vocab=50,
        embed=EMBED,
        layers=4,
        heads=HEADS,
        mlp=MLP,
        expert_mlp=12,
        latent=16,
        head_dim=HEAD_DIM,
        rope_dim=4,
        v_dim=HEAD_DIM,
        first_dense=4,
        index_heads=3,
        index_dim=8,
        index_top_k=99,
        scaling=None,
        eps=0.1,
    ),
    "alibi": models.BloomConfig(vocab=50, embed=EMBED, layers=4, heads=HEADS),
    "bert": models.BERTConfig(vocab=50, embed=EMBED, layers=4, heads=HEADS, mlp=MLP, max_seq=32),
    "long table": models.GPT2Config(vocab=50, embed=EMBED, layers=2, heads=4, max_seq=256, mlp=MLP),
}
# These models run the reference attention; the others run blockwise attention, whose programs take longer to trace.
REFERENCE = kernels.ReferenceAttention()
CORES: dict[str, Any] = dict.fromkeys(("gpt2", "jaxformer", "five layers", "long table"), REFERENCE)


# The numbers of layers of a model's stacks, where they are not four.
DEPTHS = {"dense, then mixtures": (1, 5), "n-grams": (2,)}


def of_blocks(*makes: Make, depths: tuple[int, ...] | None = None, remat: str = "none") -> nn.Transformer:
    """Return a model with one stack for each constructor of layers, a scaled embedding, and a head with a bias.

    Stacks have four layers if `depths` is None.
    """
    keys, vocab = jax.random.split(jax.random.key(0), 3), 50
    depths = depths or (4,) * len(makes)
    return nn.Transformer(
        nn.Embedding(vocab=vocab, embed=EMBED, scale=2.0, key=keys[0]),
        tuple(
            nn.with_execution(nn.Stack(make, n, key=keys[1]), remat=remat)
            for make, n in zip(makes, depths, strict=True)
        ),
        norm(),
        nn.Linear("embed -> vocab", embed=EMBED, vocab=vocab, bias=True, key=keys[2]),
        dropout=nn.Dropout(0.1),
    )


def with_streams(model: nn.Transformer) -> nn.Transformer:
    """Return the model with its residual streams if it has hyper-connections or attention residuals."""
    if nn.modules(model, nn.AttentionResidual):
        expand = nn.ExpandBlocks(sublayers=2 * sum(map(len, model.stacks)), block=ENDS)
        return dataclasses.replace(model, expand=expand, norm=nn.MergeBlocks(norm(), embed=EMBED, block=ENDS))
    if not nn.modules(model, nn.HyperConnection):
        return model
    merge = nn.MergeStreams(norm(), streams=STREAMS, embed=EMBED, key=jax.random.key(3))
    return dataclasses.replace(model, expand=nn.ExpandStreams(STREAMS), norm=merge)


def filled(build: Callable[[], Any], seed: int = 0) -> Any:
    """Return the model that `build()` constructs with random numbers drawn by numpy, also for biases and norms."""
    draw = np.random.default_rng(seed)

    def number(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            if leaf.ndim == 1 or jax.tree_util.keystr(path).endswith("alibi.numbers"):
                return put(np.broadcast_to(np.arange(leaf.shape[-1]), leaf.shape), leaf.dtype)
            # a table with some of eight experts for each token id
            return put(np.argsort(draw.random((*leaf.shape[:-1], 8)))[..., : leaf.shape[-1]], leaf.dtype)
        fan_in = np.sqrt(leaf.shape[-1]) if leaf.ndim > 2 else 4.0
        is_scale = any(name in jax.tree_util.keystr(path) for name in ("norm", "factor"))
        numbers = is_scale + draw.normal(size=leaf.shape) / fan_in
        return put(numbers, leaf.dtype)

    shapes = eqx.filter_eval_shape(build)
    with jax.ensure_compile_time_eval():  # the cached model must hold arrays, also if a test is tracing
        return jax.tree_util.tree_map_with_path(number, shapes)


@functools.cache
def model_of(name: str, remat: str = "none", dtypes: tuple[str, str] = ("float32", "float32")) -> nn.Transformer:
    """Return a small model of `FAMILIES` or `BLOCKS` by its name; `dtypes` are those of parameters and computation.

    A name may end in a word that changes the model's linear maps:

    - `lora`: every map has a LoRA adapter;
    - `int4 lora`: so has every map, and the maps beneath are quantized to 4 bits in groups;
    - `int8`: every map is a user's own map of 8 bits;
    - `int4 int8`: the same, but the maps of feed-forward layers are quantized to 4 bits in groups;
    - `fp8`: matrix products are of 8 bits.
    """
    if name.endswith(" fp8"):
        return nn.with_fp8(model_of(name.removesuffix(" fp8"), remat, dtypes))
    if name.endswith(" int4 lora"):
        plain = model_of(name.removesuffix(" int4 lora"), remat, dtypes)
        with jax.ensure_compile_time_eval():
            return eqx.filter_jit(in_four_bits)(plain)
    if name.endswith(" int8"):
        plain = model_of(name.removesuffix(" int8").removesuffix(" int4"), remat, dtypes)
        with jax.ensure_compile_time_eval():
            return eqx.filter_jit(in_eight_bits)(plain, name.endswith(" int4 int8"))
    plain = name.removesuffix(" lora")

    def build() -> nn.Transformer:
        if plain in BLOCKS:
            model = with_streams(of_blocks(*BLOCKS[plain], depths=DEPTHS.get(plain), remat=remat))
        else:
            model = models.build(FAMILIES[plain], key=jax.random.key(0))
            model = nn.with_execution(model, core=CORES.get(plain, CORE), remat=remat)
        return model if plain == name else nn.with_lora(model, [nn.Linear], rank=3, alpha=0.3, key=jax.random.key(1))

    # With seed 0 the terms of a scalar's gradient cancel to a hundredth of their size, so that rounding errors show.
    return filled(
        lambda: nn.Precision(*dtypes).apply(build()), seed=1 if plain in ("vectors of layers", "speedrun") else 0
    )


def in_eight_bits(plain: nn.Transformer, also_in_four: bool) -> nn.Transformer:
    """Return the model with a user's own maps of 8 bits in the place of its `Linear` maps.

    With `also_in_four` the feed-forward layers' maps are first quantized to 4 bits, and stay so.
    """
    model = nn.quantize(plain, "int4", group=4, where=["gate", "up", "down"]) if also_in_four else plain
    return nn.map_linears(lambda one: Int8Map.of(one) if isinstance(one, nn.Linear) else one, model)


def in_four_bits(plain: nn.Transformer) -> nn.Transformer:
    """Return the model with its maps in 4 bits, in groups of four inputs, and LoRA factors of which none is zero."""

    def drawn(node: Any) -> Any:
        if not isinstance(node, nn.LoRA):
            return node
        return eqx.tree_at(lambda m: m.up.weight, node, jax.random.normal(jax.random.key(2), node.up.shape))

    rounded = nn.quantize(plain, "int4", group=4)
    adapted = nn.with_lora(rounded, [nn.QuantizedLinear], rank=3, alpha=0.3, key=jax.random.key(1))
    return jax.tree.map(drawn, adapted, is_leaf=lambda node: isinstance(node, nn.LoRA))


def batch_of(model: nn.Transformer, rows: int = 8, seq: int = 16, seed: int = 0) -> Batch:
    """Return packed rows: in each two documents and up to two tokens of padding; targets' weights are 0 or 1."""
    draw = np.random.default_rng(seed)
    cut = draw.integers(2, seq - 4, rows)
    end = seq - draw.integers(0, 3, rows)
    place = np.arange(seq)
    second = (place >= cut[:, None]) & (place < end[:, None])
    positions = np.where(place < cut[:, None], place, np.where(second, place - cut[:, None], -1))
    segments = np.where(place < cut[:, None], 0, np.where(second, 1, 2))
    ids, targets = draw.integers(0, model.vocab, (2, rows, seq))
    weights = draw.integers(0, 2, (rows, seq)) * (positions >= 0)
    source: dict[str, Any] = {}
    if model.parts.encoder is not None:  # source rows are longer, and have two documents too
        place = np.arange(seq + 6)
        first = place < draw.integers(2, seq, rows)[:, None]
        source["source_ids"] = draw.integers(0, model.vocab, first.shape).astype(np.int32)
        after = place - first.sum(1, keepdims=True)
        source["source_positions"] = np.where(first, place, np.where(after < seq, after, -1)).astype(np.int32)
        source["source_segments"] = np.where(first, 0, 1).astype(np.int32)
    return Batch(
        ids=ids.astype(np.int32),
        targets=targets.astype(np.int32),
        weights=weights.astype(np.float32),
        positions=positions.astype(np.int32),
        segments=segments.astype(np.int32),
        examples=np.arange(rows, dtype=np.int32),
        **source,
    )


def plan_over(mesh: dict[str, int], **choices) -> Plan:
    """Return a plan over a mesh of the first devices."""
    return Plan(make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())]), **choices)


def shapes(build) -> nn.Transformer:
    """Return the model that `build` constructs, with shapes in the place of arrays."""
    return eqx.filter_eval_shape(build)
