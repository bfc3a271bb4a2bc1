"""One-device losses and gradients of small real models, and what a plan makes of the same models and rows."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqformer import Batch, models, nn
from eqformer.parallel import Plan, shardings
from eqformer.training import next_token_loss, planned_gradients
from eqformer.training._step import accumulated_gradients


NUMBERS = {
    "gpt2": models.GPT2(vocab=50, embed=32, layers=4, heads=8, max_seq=32, mlp=48, dropout=0.1),
    "llama": models.Llama(vocab=48, embed=32, layers=4, heads=8, kv_heads=2, head_dim=4, mlp=48, bias=True),
    "jaxformer": models.JAXformer(
        vocab=64, embed=32, blocks=4, layers_per_block=2, heads=8, latent=16, rope_dim=4, mlp=48, dropout=0.1
    ),
}
KEY = 7
FAST: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


def filled(build, seed: int = 0) -> Any:
    """What `build()` would give, with numpy's numbers: no weight is zero, no norm the identity."""
    draw = np.random.default_rng(seed)

    def number(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.arange(leaf.shape[0], dtype=leaf.dtype)
        fan_in = np.sqrt(leaf.shape[-1]) if leaf.ndim > 2 else 4.0
        return jnp.asarray(("norm" in jax.tree_util.keystr(path)) + draw.normal(size=leaf.shape) / fan_in, leaf.dtype)

    return jax.tree_util.tree_map_with_path(number, eqx.filter_eval_shape(build))


@functools.cache
def model_of(name: str, dtype: str = "float32", remat: str = "none", **changes: Any) -> nn.Transformer:
    """A family's small model, filled."""
    numbers = dataclasses.replace(NUMBERS[name], **changes)
    core = nn.BlockwiseCore(block=8)
    model = filled(lambda: models.build(numbers, core=core, remat=remat, key=jax.random.key(0)))
    return nn.Precision(dtype, dtype).apply(model)


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


@functools.cache
def one_device(name: str, **options: Any) -> tuple:
    """Sum, count and gradients of the plain model on one device."""
    model = model_of(name, **options)
    return compiled(accumulated_gradients(next_token_loss), model, batch_of(model))


def planned(plan: Plan, name: str, accumulate: int = 1, **options: Any) -> tuple:
    """The same under a plan."""
    model = model_of(name, **options)
    placed = place(plan.in_ring_order(model), plan)
    got = compiled(planned_gradients(plan)(next_token_loss, accumulate), placed, batch_of(model))
    return *got[:2], plan.in_ring_order(got[2], back=True)


def place(model: nn.Transformer, plan: Plan) -> nn.Transformer:
    """The model's arrays where the plan keeps them."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, shardings(plan.parameter_specs(arrays), plan.mesh)), rest)


def compiled(gradients: Any, model: nn.Transformer, batch: Batch) -> tuple:
    """Run `(model, batch, key) -> (sum, count, gradients)`, compiled in haste."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    run = jax.jit(lambda arrays, batch, key: gradients(eqx.combine(arrays, rest), batch, key))
    key = jax.random.key(KEY)
    return run.lower(arrays, batch, key).compile(compiler_options=FAST)(arrays, batch, key)


def differences(got: tuple, want: tuple, epsilons: float = 50.0) -> dict[str, float]:
    """Where two results differ by more than `epsilons` machine epsilons: the loss, the count and each leaf's gradient.

    Gradients are compared by the Frobenius norm of the difference, relative to the leaf's. A leaf whose gradient is
    nothing but rounding (that of a key's bias without rotary positions is zero) must be no more in the other result.
    """
    eps = np.finfo(np.asarray(want[0]).dtype).eps
    wrong = {}
    for part, name in enumerate(("sum", "count")):
        error = abs(float(got[part]) - float(want[part])) / abs(float(want[part]))
        if not error <= epsilons * eps:
            wrong[name] = error
    leaves = jax.tree_util.tree_leaves_with_path(want[2])
    nothing = 100 * eps * np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for _, x in leaves))
    for (path, expected), found in zip(leaves, jax.tree.leaves(got[2]), strict=True):
        expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
        size, error = np.linalg.norm(expected), np.linalg.norm(found - expected)
        if not error <= (epsilons * eps * size if size > nothing else nothing):
            wrong[jax.tree_util.keystr(path)] = float(error / size)
    return wrong
