"""Nats of a reference and probabilities of a teacher as arrays of rows, for `data.Loader.with_row_arrays`."""

import functools
from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, UInt32

from .._files import JsonObject
from .._shapes import Batch, PreferenceBatch
from ..parallel import on_first_process, Plan
from ._evaluation import make_row_nats, make_teacher_top_nats
from ._planned_state import ProcessRows


class RowArrays:
    """Arrays that a model computes for each row, under a plan; made by `reference_arrays` and `teacher_arrays`."""

    def __init__(
        self, compute: Callable[[Batch], Mapping[str, Array]], settings: JsonObject, plan: Plan, batch_size: int
    ):
        self.settings, self._compute = settings, compute
        self._process_rows = ProcessRows(plan, batch_size)
        self._replicate = jax.jit(lambda x: x, out_shardings=NamedSharding(plan.mesh, PartitionSpec()))

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of each batch that this process gives."""
        return self._process_rows.start, self._process_rows.stop

    def on_writer(self, action: Callable[[], object]) -> object:
        """Run an action in the first process, which writes the arrays; the others wait. If it raises, all do."""
        return on_first_process(action)

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the arrays of all rows of a batch, of which this process gives its own."""
        arrays = self._compute(self._process_rows.place(batch))
        return {name: np.asarray(self._replicate(x).addressable_data(0)) for name, x in arrays.items()}


def reference_arrays(reference: PyTree, plan: Plan, *, batch_size: int) -> RowArrays:
    """Return the nats of rows of preferences by a frozen model, which `add_reference_nats` computes for each batch.

    Computed once by `Loader.with_row_arrays`, they take the place of the model in memory.

    Args:
        reference: The model, sharded by the plan.
        plan: The plan.
        batch_size: The rows of a batch of the loader, which are computed at once.
    """
    row_nats = make_row_nats(plan)

    def compute(batch: Batch) -> dict[str, Array]:
        assert isinstance(batch, PreferenceBatch)
        nats = {"reference_nats": row_nats(reference, batch)}
        return nats if batch.mismatched is None else nats | {"mismatched_nats": row_nats(reference, batch.mismatched)}

    return RowArrays(compute, {"kind": "reference", "model": fingerprint(reference, plan)}, plan, batch_size)


def teacher_arrays(
    teacher: PyTree, plan: Plan, *, top: int = 64, temperature: float = 1.0, batch_size: int
) -> RowArrays:
    """Return `teacher_top_nats` of rows, for `distillation_loss` without the teacher in memory.

    A token takes `top` ids and `top + 1` numbers of 32 bits, also where a row has padding.

    Args:
        teacher: The model, sharded by the plan.
        plan: The plan.
        top: The number of ids of each token.
        temperature: The temperature of the probabilities, that of the loss.
        batch_size: The rows of a batch of the loader, which are computed at once.
    """
    if not 1 <= top <= teacher.vocab:
        raise ValueError(f"teacher_arrays(top={top}): a token has 1 to {teacher.vocab} ids; pass one of these numbers.")
    top_nats = make_teacher_top_nats(plan, top=top, temperature=temperature)

    def compute(batch: Batch) -> dict[str, Array]:
        ids, nats = top_nats(teacher, batch)
        return {"top_ids": ids, "top_nats": nats.astype(jnp.float32)}

    settings = {"kind": "teacher", "top": top, "temperature": float(temperature)}
    return RowArrays(compute, settings | {"model": fingerprint(teacher, plan)}, plan, batch_size)


def fingerprint(model: PyTree, plan: Plan | None = None) -> str:
    """Return a text that differs between models whose shapes or weights differ, the same under any plan.

    It is a hash of the bits of every array, computed where the arrays are.
    """
    arrays = eqx.filter(model, eqx.is_array)

    replicated = None if plan is None else NamedSharding(plan.mesh, PartitionSpec())

    @functools.partial(jax.jit, out_shardings=replicated)
    def hash_arrays(arrays: PyTree) -> list[UInt32[Array, ""]]:
        return [_hash_bits(x) for x in jax.tree.leaves(arrays if plan is None else plan.unshard(arrays))]

    total = sum(int(value) * (2 * index + 1) for index, value in enumerate(hash_arrays(arrays)))
    return f"{total % 2**64:016x}"


def _hash_bits(x: Array) -> UInt32[Array, ""]:
    """Return a hash of an array's bits and of their places: a sum, so that the order of devices does not matter."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    bits = x.astype(unsigned) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)
    value, stride = bits.astype(jnp.uint32), 1
    for dim in reversed(range(bits.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        value = value ^ (index * np.uint32(stride * 0x9E3779B1 % 2**32))
        value = value * np.uint32(0x85EBCA6B) ^ (value >> 13)
        stride = stride * bits.shape[dim] % 2**32
    return jnp.sum((value ^ (value >> 16)) * np.uint32(0xC2B2AE35), dtype=jnp.uint32)
