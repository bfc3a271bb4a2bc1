"""A small decoder for the tests of pipelines: it runs on one device and as a pipeline, and gradients are compared."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haste import FAST
from jax.sharding import PartitionSpec as P

from eqformer import kernels, nn
from eqformer.parallel import BATCH_AXES, filter_shard_map, layer_order, PIPE, pipeline_gradients
from eqformer.parallel.pipeline._pipelined_stack import PaddedBlock, skip_padding, take_layer_rows


EMBED, VOCAB, SEQ, LAYERS = 16, 32, 12, 8


def make_block(key):
    """Return a block with every kind of parameter: grouped-query attention with biases and sinks, an MLP, norms."""
    attention, feed_forward = jax.random.split(key)
    return nn.Block(
        nn.Residual(
            nn.Attention(
                embed=EMBED,
                heads=4,
                kv_heads=2,
                head_dim=4,
                bias=True,
                scores=nn.Scores(sinks=jnp.zeros(4)),
                key=attention,
                core=kernels.ReferenceAttention(),
                rotary=nn.Rotary(dim=4, theta=1e4),
            ),
            nn.RMSNorm("embed", embed=EMBED),
            dropout=nn.Dropout(0.1),
        ),
        nn.Residual(
            nn.GatedMLP(embed=EMBED, mlp=32, key=feed_forward),
            nn.RMSNorm("embed", embed=EMBED),
            dropout=nn.Dropout(0.1),
        ),
    )


counts: list[int] = []


class PlainBlock(nn.Layer):
    """A residual linear layer that is quick to compile; if `counted`, each run appends to `counts`."""

    linear: nn.Linear
    counted: bool = eqx.field(static=True)

    def __call__(self, x, tokens=None, cache=None):
        """Return the layer's output, and the cache unchanged."""
        if self.counted:
            jax.debug.callback(lambda _: counts.append(1), x.ravel()[0])  # x keeps it inside of loops
        return x + jnp.tanh(self.linear(x)), cache, None

    def init_cache(self, batch, capacity, dtype="float32"):
        """Return None: the layer needs no cache."""


def plain_block(key):
    """Return a `PlainBlock`."""
    return PlainBlock(nn.Linear("embed -> mlp", embed=EMBED, mlp=EMBED, key=key), False)


def counted_block(key):
    """Return a `PlainBlock` that counts its runs in `counts`."""
    return PlainBlock(nn.Linear("embed -> mlp", embed=EMBED, mlp=EMBED, key=key), True)


class Edges(eqx.Module):
    """The parts of the decoder outside its layers."""

    embedding: nn.Embedding
    norm: nn.RMSNorm
    head: nn.Linear


@functools.cache
def make_model(layers=LAYERS, remat="none", dtype="float32", block=make_block):
    """Return the decoder: its edges and a stack of blocks."""

    @eqx.filter_jit
    def build():
        keys = jax.random.split(jax.random.key(1), 3)
        edges = Edges(
            nn.Embedding(vocab=VOCAB, embed=EMBED, std=1.0, key=keys[0]),
            nn.RMSNorm("embed", embed=EMBED),
            nn.Linear("embed -> vocab", embed=EMBED, vocab=VOCAB, key=keys[1]),
        )
        stack = nn.with_execution(nn.Stack(block, layers, key=keys[2]), remat=remat)
        return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, (edges, stack))

    return build()


def make_data(rows, seed=0, keys=True):
    """Return rows of two documents, with weights of 0 and 1, and a random key for each token if `keys`."""
    draw = np.random.default_rng(seed)
    ids, targets = draw.integers(0, VOCAB, (2, rows, SEQ)).astype(np.int32)
    cut = draw.integers(3, SEQ - 3, rows)[:, None]
    place = np.arange(SEQ)[None]
    positions = np.where(place < cut, place, place - cut).astype(np.int32)
    weights = (draw.random((rows, SEQ)) < 0.8).astype(np.float32)
    segments = (place >= cut).astype(np.int32)
    examples, places = jnp.arange(rows), jnp.broadcast_to(jnp.arange(SEQ), (rows, SEQ))
    tokens = nn.Tokens(
        jnp.asarray(positions),
        jnp.asarray(segments),
        nn.token_keys(jax.random.key(7), examples, places) if keys else None,
    )
    return {"ids": jnp.asarray(ids), "targets": jnp.asarray(targets), "weights": jnp.asarray(weights), "tokens": tokens}


def first(edges, piece):
    """The pipeline's function before the layers: embed the ids."""
    return edges.embedding(piece["ids"])


def stage(stack, x, piece):
    """The pipeline's function of a stage: run its layers."""
    return stack(x, piece["tokens"])[0]


def last(edges, x, piece):
    """The pipeline's function behind the layers: return the sum of the losses, and the sum of the weights."""
    logits = edges.head(edges.norm(x))
    nats = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, piece["targets"][..., None], -1)[..., 0]
    weights = piece["weights"].astype(nats.dtype)
    return jnp.sum(nats * weights), jnp.sum(weights)


def one_device(model, data):
    """Return the loss's sum, its count and the gradients of all rows, computed at once on one device."""

    def run(model, data):
        def loss(model):
            edges, stack = model
            return last(edges, stage(stack, first(edges, data), data), data)

        (total, count), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        return total, count, gradients

    program, arrays = compiled(run, model, data)
    return program(arrays)


def pipelined(mesh, schedule, functions=(first, stage, last), specs=P(PIPE), batch=BATCH_AXES, run=pipeline_gradients):
    """Return a function `(model, data) -> (sum, count, gradients)` that runs as a pipeline over the mesh.

    The results are summed over the axes `batch` at the end.
    """
    order = lambda stack: layer_order(stack.depth, schedule.part_of)
    back = lambda stack: np.argsort(order(stack), kind="stable")[: stack.depth]
    split = lambda x: x.reshape(schedule.microbatches, -1, *x.shape[1:])
    is_skipping = lambda node: isinstance(node, PaddedBlock)
    unpadded = lambda tree: jax.tree.map(lambda n: n.inner if is_skipping(n) else n, tree, is_leaf=is_skipping)

    def per_device(model, data):
        (edges, stack), rows = model, len(order(model[1]))
        (stack,) = skip_padding((stack,), [rows], schedule.part_of)
        total, count, (edges, blocks) = run(schedule, *functions, (edges, stack), data)
        blocks = unpadded(blocks)
        return jax.lax.psum((total, count), batch), jax.tree.map(lambda g: jax.lax.psum(g, batch), (edges, blocks))

    mapped = filter_shard_map(per_device, mesh, ((P(), specs), P(None, batch)), ((P(), P()), (P(), specs)))

    def whole(model, data):
        edges, stack = model
        arrays, rest = eqx.partition(stack, eqx.is_array)
        stack = eqx.combine(jax.tree.map(lambda x: take_layer_rows(x, order(stack)), arrays), rest)
        (total, count), (edges, blocks) = mapped((edges, stack), jax.tree.map(split, data))
        return total, count, (edges, jax.tree.map(lambda x: x[back(stack)], blocks))

    return whole


def compiled(fn, *args, level=0):
    """Return the function compiled for these arguments, and their arrays; with `level` 0 it is compiled in haste."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    run = jax.jit(lambda arrays: fn(*eqx.combine(arrays, rest)))
    options = FAST if level == 0 else {}
    return run.lower(arrays).compile(compiler_options=options), arrays


def worst(ours, theirs):
    """Return the largest relative distance between two trees' leaves, with the leaf's path."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(eqx.filter(x, eqx.is_inexact_array)) for x in (ours, theirs))
    assert len(ours) == len(theirs)
    far = []
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, path
        far.append((np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30), jax.tree_util.keystr(path)))
    return max(far)
