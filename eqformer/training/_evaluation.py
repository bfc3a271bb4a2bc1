"""Evaluation under a plan: sums over a batch, arrays for each row, and callbacks that validate and evaluate a run.

The arrays for each row are a reference model's loss in nats, or a teacher's log-probabilities.
`data.Loader.with_row_arrays` adds them to batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from .._files import JsonObject
from .._shapes import Batch, batch_fields, DistillationBatch, PolicyBatch, PreferenceBatch
from ..nn import Tokens
from ..parallel import BATCH_AXES, CONTEXT, filter_shard_map, on_first_process, OnDevice, Plan
from ._loop import Every, Progress
from ._metrics import bits_per_byte
from ._planned_state import ProcessRows
from ._step import Step
from ._train_state import TrainState
from .losses._distillation import teacher_top_nats
from .losses._loss_aux import LossAux, LossFn
from .losses._policy import token_log_probs
from .losses._token_losses import batch_tokens, evaluation_sums, kto_baseline, pair_rewards, PreferenceLoss, row_nats
from .losses._vocabulary import Vocabulary


def make_evaluation(plan: Plan) -> Callable[[PyTree, Batch], dict[str, Float[Array, ""]]]:
    """Return a jitted function `(model, batch)` that computes `evaluation_sums` under a plan."""
    return _make_forward(plan, evaluation_sums, PartitionSpec(), OnDevice.total)


def make_loss_evaluation(
    plan: Plan, loss: LossFn, *, accuracy: str
) -> Callable[[PyTree, Batch], dict[str, Float[Array, ""]]]:
    """Return a jitted function `(model, batch)` that sums a loss of whole texts over a batch under a plan.

    The function returns three sums. `nats` is the sum of the losses. `correct` is the sum of the loss's metric with the
    name `accuracy`: `"retrieval_accuracy"` for a `contrastive_loss`, `"accuracy"` for `classification_loss`. `count` is
    the number of groups or of texts.
    """

    def sums(
        model: PyTree, batch: Batch, *, tokens: Tokens | None = None, vocabulary: Vocabulary | None = None
    ) -> dict[str, Float[Array, ""]]:
        total, aux = loss(model, batch, None, tokens=tokens, vocabulary=vocabulary)
        assert isinstance(aux, LossAux)
        correct, _ = aux.metrics[accuracy]
        return {"nats": total, "correct": correct, "count": aux.count}

    return _make_forward(plan, sums, PartitionSpec(), OnDevice.total)


def make_row_nats(plan: Plan) -> Callable[[PyTree, Batch], Float[Array, "batch"]]:
    """Return a jitted function `(model, batch)` that computes `row_nats` under a plan."""
    return _make_forward(plan, row_nats, PartitionSpec(plan.batch_axes))


def make_token_log_probs(plan: Plan) -> Callable[[PyTree, PolicyBatch], Float[Array, "batch seq"]]:
    """Return a jitted function `(model, batch)` that computes `token_log_probs` under a plan."""
    return _make_forward(plan, token_log_probs, PartitionSpec(plan.batch_axes, CONTEXT))


def make_reward_evaluation(
    plan: Plan, loss: PreferenceLoss, *, beta: float
) -> Callable[[PyTree, PreferenceBatch], dict[str, Float[Array, ""]]]:
    """Return a jitted function `(model, batch)` that sums the rewards of a batch of preference pairs.

    `loss` and `beta` define the rewards. The sums are `reward_margin` and `reward_accuracy`, as in `preference_loss`,
    and `pairs`, the number of pairs. Pairs whose weights are all 0 do not count; they fill the last batch of an epoch.
    """
    row_nats = make_row_nats(plan)

    @jax.jit
    def sum_rewards(nats: Array, batch: PreferenceBatch) -> dict[str, Float[Array, ""]]:
        is_pair = jnp.any(batch.weights[::2] > 0, axis=-1).astype(nats.dtype)
        rewards = pair_rewards(loss, beta, nats, batch)
        margins = rewards[::2] - rewards[1::2]
        correct = jnp.sum(jnp.where(margins > 0, is_pair, jnp.zeros_like(is_pair)))
        return {"reward_margin": jnp.sum(margins * is_pair), "reward_accuracy": correct, "pairs": jnp.sum(is_pair)}

    return lambda model, batch: sum_rewards(row_nats(model, batch), batch)


def add_reference_nats(batches: Iterable[PreferenceBatch], reference: PyTree, plan: Plan) -> Iterator[PreferenceBatch]:
    """Yield each batch with the nats of its rows under a frozen reference model.

    The nats of the batch's `mismatched` rows are added too. The nats are computed under a plan when the batch is read.
    """
    add = make_reference_nats(plan)
    for batch in batches:
        yield add(reference, batch)


def make_reference_nats(plan: Plan) -> Callable[[PyTree, PreferenceBatch], PreferenceBatch]:
    """Return a function `(reference, batch)` that adds a frozen model's nats to a batch, see `add_reference_nats`."""
    row_nats = make_row_nats(plan)

    def add(reference: PyTree, batch: PreferenceBatch) -> PreferenceBatch:
        mismatched = batch.mismatched
        if mismatched is not None:
            mismatched = dataclasses.replace(mismatched, reference_nats=row_nats(reference, mismatched))
        return dataclasses.replace(batch, reference_nats=row_nats(reference, batch), mismatched=mismatched)

    return add


class KtoStep:
    """A training step for KTO, called like a `Step`: it computes the batch's `baseline` before it takes the step.

    `step` is `make_step(preference_loss("kto"), optimizer, plan)`. The baseline, a `kto_baseline`, compares the nats of
    the batch's `mismatched` rows under the state's model with their nats under the reference (`add_reference_nats`).
    All microbatches of a batch share one baseline, on any mesh.
    """

    def __init__(self, step: Step, plan: Plan):
        self.step, self.plan = step, plan
        self._row_nats = make_row_nats(plan)
        shardings = [NamedSharding(plan.mesh, spec) for spec in (PartitionSpec(BATCH_AXES), PartitionSpec())]

        def repeat_baseline(nats: Array, reference_nats: Array) -> tuple[Float[Array, "batch"], Float[Array, ""]]:
            baseline = kto_baseline(nats, reference_nats)
            return jnp.broadcast_to(baseline, nats.shape), baseline

        self._baseline = jax.jit(repeat_baseline, out_shardings=tuple(shardings))

    def compile(self, state: PyTree, batch: PreferenceBatch, key: PyTree = None) -> "KtoStep":
        """Return the step compiled for arguments like these, or for their shapes."""
        if self.step.program is not None:
            return self
        like = batch.examples
        baseline = jax.ShapeDtypeStruct(like.shape, jnp.float32, sharding=getattr(like, "sharding", None))
        batch = dataclasses.replace(batch, baseline=baseline, mismatched=None)
        return KtoStep(self.step.compile(state, batch, key), self.plan)

    def __call__(
        self, state: TrainState, batch: PreferenceBatch, key: Key[Array, ""] | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """Take one step; `state` is donated. The metrics also have the batch's `baseline`."""
        mismatched = batch.mismatched
        if mismatched is None or mismatched.reference_nats is None:
            raise ValueError(
                "KtoStep(state, batch): the batch needs mismatched rows with their reference_nats; make it by a Loader "
                "with packing='labelled' and training.add_reference_nats."
            )
        rows, baseline = self._baseline(self._row_nats(state.model, mismatched), mismatched.reference_nats)
        state, metrics = self.step(state, dataclasses.replace(batch, baseline=rows, mismatched=None), key)
        return state, metrics | {"baseline": baseline}


def add_teacher(batches: Iterable[Batch], teacher: PyTree, plan: Plan | None = None) -> Iterator[DistillationBatch]:
    """Yield each batch with a teacher and the teacher's hidden states, which are computed when the batch is read.

    The teacher is any model with the same token ids; under a plan, pass `plan.shard(models.load(..., plan=plan))`.
    """
    if plan is None:
        hidden_states = eqx.filter_jit(_hidden_states)
    else:
        hidden_states = _make_forward(plan, _hidden_states, PartitionSpec(plan.batch_axes, CONTEXT))
    for batch in batches:
        teacher_hidden = hidden_states(teacher, batch)
        yield DistillationBatch(**batch_fields(batch), teacher=teacher, teacher_hidden=teacher_hidden)


def make_teacher_top_nats(
    plan: Plan, *, top: int, temperature: float
) -> Callable[[PyTree, Batch], tuple[Int[Array, "batch seq top"], Float[Array, "batch seq buckets"]]]:
    """Return a jitted function `(teacher, batch)` that computes `teacher_top_nats` under a plan."""
    top_nats = functools.partial(teacher_top_nats, top=top, temperature=temperature)
    return _make_forward(plan, top_nats, PartitionSpec(plan.batch_axes, CONTEXT))


def _hidden_states(
    model: PyTree, batch: Batch, *, tokens: Tokens | None = None, vocabulary: Vocabulary | None = None
) -> Float[Array, "batch seq embed"]:
    """Return a model's output before its logits, without dropout."""
    return model.encode(jnp.asarray(batch.ids), batch_tokens(batch) if tokens is None else tokens)[0]


def _make_forward(
    plan: Plan,
    function: Callable[..., PyTree],
    out_specs: PartitionSpec,
    finish: Callable[[OnDevice, Array], Array] = OnDevice.replicate,
) -> Callable[[PyTree, Batch], PyTree]:
    """Jit `function(model, batch, tokens=..., vocabulary=...)`, run on each device's rows.

    `finish` makes the results equal on all devices along the mesh axes that `out_specs` does not name. Without a
    pipeline the batch is not split into microbatches, since no residuals are stored for a backward pass.
    """
    forward_plan = plan if plan.is_pipelined else dataclasses.replace(plan, microbatches=1)

    @eqx.filter_jit
    def forward(model: PyTree, batch: Batch) -> PyTree:
        forward_plan.check(model, rows=batch.ids.shape[0], seq=batch.ids.shape[1])
        device = plan.on_device(model)

        def per_device(model: PyTree, rows: PyTree) -> PyTree:
            batch, tokens = rows
            results = function(device.wrap_forward(model), batch, tokens=tokens, vocabulary=device.vocabulary)
            return jax.tree.map(functools.partial(finish, device), results)

        rows = plan.arrange(batch, batch_tokens(batch))
        specs = plan.parameter_specs(model), plan.batch_specs(rows)
        results = filter_shard_map(per_device, plan.mesh, specs, out_specs)(model, rows)
        return jax.tree.map(plan.to_token_order, results) if CONTEXT in out_specs else results

    return forward


class Means(Protocol):
    """Interface of means over held-out text, such as `data.ValidationMeans`."""

    @property
    def loss(self) -> float:
        """The mean loss, in nats a token."""
        ...

    @property
    def accuracy(self) -> float:
        """The share of tokens whose target has the largest logit."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of text for each token."""
        ...

    @property
    def rewards(self) -> Mapping[str, float]:
        """Means over pairs of completions, by name."""
        ...


class Validation(Every):
    """A callback that writes a row of validation metrics after each `every` steps.

    The row has `validation_loss`, `validation_bits_per_byte` and `validation_accuracy`. For pairs of completions, the
    row also has `validation_reward_margin` and `validation_reward_accuracy`. If there are several sources of text, it
    has a `validation_loss/NAME` for each source.
    """

    def __init__(
        self,
        every: int,
        means: Callable[[PyTree], tuple[Means, Mapping[str, Means]]],
        write: Callable[[dict[str, int | float]], object],
        *,
        has_bits: bool = True,
    ):
        """Set the functions that compute the metrics and write the row.

        `means(model)` returns the means over all held-out text, and the means of each source, as `Corpus.validate`
        does. `write` is called with the row. `has_bits` says whether the row has bits per byte, which need a loss over
        all tokens of a text.
        """
        super().__init__(every, self._validate)
        self._means, self._write, self._has_bits = means, write, has_bits

    def _validate(self, run: Progress) -> None:
        mean, by_source = self._means(run.state.model)
        row: dict[str, int | float] = {
            "step": run.step,
            "validation_loss": mean.loss,
            "validation_accuracy": mean.accuracy,
        }
        if self._has_bits:
            row["validation_bits_per_byte"] = bits_per_byte(mean.loss, mean.bytes_per_token)
        row |= {f"validation_{name}": value for name, value in mean.rewards.items()}
        sources = by_source if len(by_source) > 1 else {}
        self._write(row | {f"validation_loss/{name}": source.loss for name, source in sources.items()})


class Evaluations(Every):
    """A callback that writes a model's scores before a run's first step, after each `every` steps, and after the last.

    A run that resumes from a checkpoint writes no scores before its next step, because it has written them already.
    """

    def __init__(
        self,
        every: int,
        evaluate: Callable[[PyTree], Mapping[str, int | float]],
        write: Callable[[dict[str, int | float]], object],
    ):
        """`evaluate(model)` returns scores by name, and `write` is called with the row of a step."""
        super().__init__(every, self._evaluate)
        self._scores, self._write = evaluate, write

    def begin(self, run: Progress) -> None:
        """Write the scores of the model before its first step."""
        if run.step == 0:
            self._evaluate(run)

    def _evaluate(self, run: Progress) -> None:
        self._write({"step": run.step, **self._scores(run.state.model)})


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
        """The first row of each batch that this process passes, and the row after the last."""
        return self._process_rows.start, self._process_rows.stop

    def on_writer(self, action: Callable[[], object]) -> object:
        """Run an action in the first process, which writes the arrays, while the other processes wait.

        If the action raises an error, all processes raise it.
        """
        return on_first_process(action)

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the arrays of all rows of a batch; each process passes only its own rows."""
        arrays = self._compute(self._process_rows.place(batch))
        return {name: np.asarray(self._replicate(x).addressable_data(0)) for name, x in arrays.items()}


def reference_arrays(reference: PyTree, plan: Plan, *, batch_size: int) -> RowArrays:
    """Return the nats of preference rows under a frozen reference model, for `Loader.with_row_arrays`.

    The nats are computed once, so the model need not stay in memory, as it must for `add_reference_nats`.

    Args:
        reference: The model, sharded by the plan.
        plan: The plan.
        batch_size: The number of rows in a batch of the loader; these rows are computed at once.
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

    Each token, padding included, takes `top` ids and `top + 1` log-probabilities, of 32 bits each.

    Args:
        teacher: The model, sharded by the plan.
        plan: The plan.
        top: The number of ids of each token.
        temperature: The temperature of the probabilities; the loss must have the same temperature.
        batch_size: The number of rows in a batch of the loader; these rows are computed at once.
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
    """Return a hash of a model's weights, as text: it differs between models, and is the same under any plan.

    The bits of every array are hashed on the devices that hold the array.
    """
    arrays = eqx.filter(model, eqx.is_array)

    replicated = None if plan is None else NamedSharding(plan.mesh, PartitionSpec())

    @functools.partial(jax.jit, out_shardings=replicated)
    def hash_arrays(arrays: PyTree) -> list[UInt32[Array, ""]]:
        return [_hash_bits(x) for x in jax.tree.leaves(arrays if plan is None else plan.unshard(arrays))]

    total = sum(int(value) * (2 * index + 1) for index, value in enumerate(hash_arrays(arrays)))
    return f"{total % 2**64:016x}"


def _hash_bits(x: Array) -> UInt32[Array, ""]:
    """Return a hash of an array's numbers and their indices: a sum, so that the order of devices does not matter."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    bits = x.astype(unsigned) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)
    value, stride = bits.astype(jnp.uint32), 1
    for dim in reversed(range(bits.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        value = value ^ (index * np.uint32(stride * 0x9E3779B1 % 2**32))
        value = value * np.uint32(0x85EBCA6B) ^ (value >> 13)
        stride = stride * bits.shape[dim] % 2**32
    return jnp.sum((value ^ (value >> 16)) * np.uint32(0xC2B2AE35), dtype=jnp.uint32)
