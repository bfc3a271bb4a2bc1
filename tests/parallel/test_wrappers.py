"""Each parallel wrapper around one module gives the plain module's results and gradients."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from plan_models import filled
from plan_parity import hastily

from eqformer import kernels, nn
from eqformer.parallel import (
    ContextAttention,
    FeatureLinear,
    filter_shard_map,
    Gathered,
    Layout,
    make_mesh,
    make_residual_stream,
    partition_specs,
    ReplicatedStream,
    SequenceStream,
    SplitEmbedding,
    SplitNorm,
    SplitVocabulary,
    TensorParallelLayer,
    TensorParallelMixer,
    zigzag,
    zigzag_inverse,
)


EMBED, HEADS, MLP, VOCAB, ROWS, SEQ = 16, 8, 24, 20, 2, 16
CLOSE = 1e-5


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, tensor=4)


def x_and_direction(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """An input, and what the result is multiplied by before it is summed."""
    draw = np.random.default_rng(1)
    return draw.normal(size=shape).astype(np.float32), draw.normal(size=shape).astype(np.float32)


def value_and_gradients(call, module, x, direction):
    """What a module gives, and the gradients of a product with it."""

    def product(wanted, direction):
        y = call(*wanted)
        return jnp.sum(y * direction), y

    (_, y), gradients = eqx.filter_value_and_grad(product, has_aux=True)((module, x), direction)
    return y, gradients


class Plain(NamedTuple):
    """A module, an input and a direction, and what the module makes of them by itself."""

    module: Any
    given: tuple[np.ndarray, np.ndarray]
    found: Any


@functools.cache
def plain(make: Callable[[], Any], inputs: int = EMBED, outputs: int = EMBED) -> Plain:
    """The same for all cases of a module."""
    module, (x, direction) = filled(make), x_and_direction(ROWS, SEQ, max(inputs, outputs))
    given = x[..., :inputs], direction[..., :outputs]
    return Plain(module, given, ran(lambda module, x: module(x), module, *given))


def ran(call, module, x, direction):
    """What comes of one way to call a module; of a mixer's results, the first."""
    first = lambda *args: y[0] if isinstance(y := call(*args), tuple) else y
    return hastily(lambda *args: value_and_gradients(first, *args), module, x, direction)(module, x, direction)


def error(call, plain: Plain) -> float:
    """The largest relative difference of results and of each gradient from the plain module's."""
    got = ran(call, plain.module, *plain.given)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(plain.found), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def mlp() -> nn.MLP:
    """A feed-forward layer with biases."""
    return nn.MLP(embed=EMBED, mlp=MLP, bias=True, key=jax.random.key(0))


def linear() -> nn.Linear:
    """A map with a bias."""
    return nn.Linear("embed -> mlp", embed=EMBED, mlp=MLP, bias=True, key=jax.random.key(0))


def attention() -> nn.Attention:
    """Four key heads, one for each device."""
    rotary, core = nn.Rotary(4, 1e4), kernels.BlockwiseAttention(4)
    sizes: dict[str, Any] = {"embed": EMBED, "heads": HEADS, "kv_heads": 4, "head_dim": 4}
    return nn.Attention(**sizes, rotary=rotary, core=core, key=jax.random.key(0))


@pytest.mark.parametrize("residual", ["replicated", "sequence"])
def test_tensor_around_a_feed_forward_layer(mesh, residual):
    alone = plain(mlp)
    specs = partition_specs(alone.module, Layout({"mlp": "tensor"}), mesh)
    stream = P("fsdp", "tensor") if residual == "sequence" else P("fsdp")
    run = lambda module, x: TensorParallelLayer(module, make_residual_stream(residual))(x)
    split = filter_shard_map(run, mesh, (specs, stream), stream)
    assert error(split, alone) < CLOSE


@pytest.mark.grid
def test_tensor_around_an_attention_of_shared_keys(mesh):
    """Two key heads on four devices: held whole, and each device reads the one of its query heads."""
    sizes: dict[str, Any] = {"embed": EMBED, "heads": HEADS, "kv_heads": 2, "head_dim": 4}
    parts: dict[str, Any] = {
        "core": kernels.ReferenceAttention(),
        "rotary": nn.Rotary(4, 1e4),
    }  # without which a key's bias has no gradient
    alone = plain(lambda: nn.Attention(**sizes, **parts, bias=True, key=jax.random.key(0)))
    layout = Layout({"heads": "tensor", "kv_heads": "tensor"}, lenient=frozenset({"kv_heads"}))
    specs = partition_specs(alone.module, layout, mesh)

    def run(module, x):
        return TensorParallelMixer(TensorParallelLayer(module, SequenceStream("ring"), shares_kv_heads=True))(x)[0]

    stream = P("fsdp", "tensor")
    split = filter_shard_map(run, mesh, (specs, stream), stream)
    assert error(split, alone) < CLOSE


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_of_features_that_are_split(mesh, kind):
    alone = plain(lambda: kind("embed", embed=EMBED))
    specs = partition_specs(alone.module, Layout({"embed": "tensor"}), mesh)
    features = P("fsdp", None, "tensor")
    split = filter_shard_map(lambda module, x: SplitNorm(module, "tensor")(x), mesh, (specs, features), features)
    assert error(split, alone) < CLOSE


@pytest.mark.parametrize("overlap", ["none", "bidirectional"])
def test_a_map_of_features(mesh, overlap):
    """Slices of features in, slices of features out; the bias lies with the outputs, the weight with the inputs."""
    alone = plain(linear, EMBED, MLP)
    specs = partition_specs(alone.module, Layout({"embed": "tensor", "mlp": "tensor"}), mesh)
    assert (specs.weight, specs.bias) == (P(None, "tensor"), P("tensor"))
    features = P("fsdp", None, "tensor")

    def run(module, x):
        return FeatureLinear(module, scatters=True, overlap=overlap)(x)

    split = filter_shard_map(run, mesh, (specs, features), features)
    assert error(split, alone) < CLOSE


@pytest.mark.by_default("17")
@pytest.mark.parametrize("vocab", [VOCAB, 17])
def test_a_vocabulary_that_is_split(mesh, vocab):
    """Lookup and loss by the same table: the logits are never whole. The last part of 17 rows is padded."""
    table = filled(lambda: nn.Embedding(vocab=vocab, embed=EMBED, key=jax.random.key(0)))
    ids, targets = np.random.default_rng(0).integers(0, vocab, (2, ROWS, SEQ)).astype(np.int32)

    def run(table, ids, targets):
        rows = table.weight  # this device's
        split = SplitEmbedding(table, total=vocab, stream=ReplicatedStream())
        hidden = jax.lax.pcast(jnp.tanh(split(ids)), "tensor", to="varying")
        logits = split.unembed(hidden).reshape(-1, rows.shape[0])
        nats, _ = SplitVocabulary(vocab).nats(logits, targets.reshape(-1))
        return jax.lax.psum(jnp.sum(nats), "fsdp")

    def whole(table, ids, targets):
        logits = table.unembed(jnp.tanh(table(ids)))
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))

    def padded(table):
        missing = -vocab % 4
        return eqx.tree_at(lambda t: t.weight, table, jnp.pad(table.weight, ((0, missing), (0, 0))))

    split = filter_shard_map(run, mesh, (P("tensor"), P("fsdp"), P("fsdp")), P())
    got = hastily(eqx.filter_value_and_grad(lambda *args: split(padded(args[0]), *args[1:])), table, ids, targets)
    want = hastily(eqx.filter_value_and_grad(whole), table, ids, targets)
    got, want = got(table, ids, targets), want(table, ids, targets)
    assert abs(got[0] - want[0]) < CLOSE * abs(want[0])
    assert np.linalg.norm(got[1].weight - want[1].weight) < CLOSE * np.linalg.norm(want[1].weight)


@pytest.mark.parametrize("keeps", [False, True])
def test_parameters_gathered_for_the_moment_of_their_use(mesh, keeps):
    alone = plain(mlp)
    specs = partition_specs(alone.module, Layout(fsdp_axis="fsdp", smallest=32), mesh)
    dims = tuple(next((i for i, entry in enumerate(spec) if entry), None) for spec in jax.tree.leaves(specs))
    assert dims == (0, None, 1, None)  # two matrices on their larger dims; biases are too small

    def run(module, x):
        return Gathered(module, dims, ("float32",) * len(dims), keeps)(x)

    split = filter_shard_map(run, mesh, (specs, P("fsdp", "tensor")), P("fsdp", "tensor"))
    assert error(split, alone) < CLOSE


@pytest.mark.grid
@pytest.mark.parametrize("method", ["ring", "gather", "heads"])
def test_an_attention_of_pieces_of_rows(method):
    mesh = make_mesh(context=4, replica=2)
    order, back = (np.arange(SEQ),) * 2 if method == "heads" else (zigzag(SEQ, 4), zigzag_inverse(SEQ, 4))
    positions = np.broadcast_to(order.astype(np.int32), (ROWS, SEQ))

    def run(module, x, positions):
        module = eqx.tree_at(lambda m: m.core, module, ContextAttention(module.core, method))
        return module(x, nn.Tokens(positions))[0]

    rows = P("replica", "context")
    mapped = filter_shard_map(run, mesh, (P(), rows, rows), rows)
    assert error(lambda module, x: mapped(module, x[:, order], positions)[:, back], plain(attention)) < CLOSE
