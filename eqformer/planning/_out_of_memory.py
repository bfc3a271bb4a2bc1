"""Ways to train in less memory, for a step that is out of memory and for a plan that does not fit."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .. import nn, parallel, training
from .._failures import requested_bytes
from .._shapes import Batch
from ..parallel import FSDP, PIPE
from ._forecast import DeviceMemory
from ._held_bytes import state_bytes, step_bytes
from ._report import FormatPlan, gigabytes
from ._search import Candidate, search_plans


_MAX_TRACED = 6  # Maximum number of plans over other meshes to trace; each trace takes a second or two.
_PHASES = [training.SchedulePhase(0, 2, 1)]  # Any learning rates will do: they do not change the bytes of a step.


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """A training step, with the settings that decide how many bytes it holds."""

    model: nn.LanguageModel
    """The model with these settings, or its shapes."""
    plan: parallel.Plan
    """The plan, whose mesh may be abstract."""
    batch: Batch
    """The shapes of a step's batch, such as `batch_shapes` returns."""
    optimization: training.Optimization = training.Optimization()
    """The settings of the optimizer."""
    precision: nn.Precision = nn.Precision()
    """The precision that the model has."""
    execution: nn.Execution = nn.Execution()
    """The execution settings that the model has."""
    trained: training.Trained = training.trainable
    """A function that picks the trained parameters of a model, as in `training.optimizer`."""

    def states(self) -> training.PlannedState:
        """Describe the training state under the plan; the optimizer's learning rates are placeholders."""
        optimizer = self.optimization.optimizer(self.model, _PHASES, trained=self.trained)
        return training.PlannedState(lambda: self.model, optimizer, self.plan, model_shapes=self.model)

    def with_settings(self, settings: Mapping[str, object]) -> "TrainingSetup":
        """Return the setup with other settings: `{"plan.zero": 3, "execution.remat": "full"}`.

        The model then has shapes instead of arrays. Raises a `ValueError` for settings that contradict each other.
        """
        parts: dict[str, Any] = {}
        for path, value in settings.items():
            part, _, field = path.partition(".")
            parts[part] = dataclasses.replace(parts.get(part, getattr(self, part)), **{field: value})
        model = eqx.filter_eval_shape(lambda: self.model)
        if "precision" in parts:
            model = eqx.filter_eval_shape(parts["precision"].apply, model)
        if "execution" in parts:
            model = parts["execution"].apply(model)
        return dataclasses.replace(self, model=model, **parts)


class SmallerSetup(NamedTuple):
    """A setup that fits into memory, and its differences from the original setup."""

    settings: dict[str, object]
    """The settings that differ, by their paths in a `TrainingSetup`, such as `{"plan.zero": 3}`."""
    setup: TrainingSetup
    held: int
    """The bytes that a device holds, by formulas."""


FormatSettings = Callable[[Mapping[str, object]], str]
"""A function that returns settings, such as `{"plan.zero": 3}`, as text."""


def find_smaller_setups(setup: TrainingSetup, memory: int, platform: str, *, limit: int = 3) -> list[SmallerSetup]:
    """Return up to `limit` setups on the same mesh that fit into memory.

    Several kinds of changes are tried: sharding all weights; recomputing activations; storing activations on hosts;
    dividing the batch into more microbatches, with or without recomputation; and storing the state in fewer bits. The
    smallest sufficient change of each kind is returned. Only storing the state in fewer bits changes results.

    Args:
        setup: The setup that does not fit.
        memory: The bytes of a device.
        platform: The compiler's platform, `cuda`, `tpu` or `cpu`.
        limit: Maximum number of setups.
    """
    smaller_setups: list[SmallerSetup] = []
    for variants in _variants_by_kind(setup, platform):
        if len(smaller_setups) >= limit:
            break
        for settings in variants:
            if (smaller_setup := _fit(setup, settings, memory, platform)) is not None:
                smaller_setups.append(smaller_setup)
                break
    return smaller_setups


def _variants_by_kind(setup: TrainingSetup, platform: str) -> Iterator[list[dict[str, object]]]:
    """Yield a list of settings for each kind of change; with each further entry of a list, a step needs fewer bytes."""
    plan, remat = setup.plan, setup.execution.remat
    pieces = (setup.batch.ids.shape[0] // plan.microbatches).bit_length()
    doublings = [{"plan.microbatches": plan.microbatches << doubling} for doubling in range(1, pieces)]

    def with_more_microbatches(settings: dict[str, object]) -> list[dict[str, object]]:
        return [settings | doubling for doubling in doublings]

    recompute: dict[str, object] = {"execution.remat": "full"}
    if plan.size(FSDP) > 1 and plan.zero < 3:
        yield [{"plan.zero": 3}]
    if remat != "full":
        yield [recompute]
    if platform != "cpu" and plan.size(PIPE) == 1 and remat != "full_on_host":
        yield [{"execution.remat": "full_on_host"}]
    if plan.size(PIPE) > 1 and not plan.stage_remat:
        recompute = recompute | {"plan.stage_remat": True}
        yield [recompute]
    if remat != "full":
        yield with_more_microbatches({})
    yield with_more_microbatches(recompute)
    short_moments = recompute | {"optimization.moments": "bfloat16"}
    short_state = short_moments | {"precision.parameters": "bfloat16", "precision.compute": "bfloat16"}
    yield [
        short_moments,
        *with_more_microbatches(short_moments),
        short_state,
        *with_more_microbatches(short_state),
    ]


def _fit(setup: TrainingSetup, settings: dict[str, object], memory: int, platform: str) -> SmallerSetup | None:
    """Return the setup with these settings; None if the plan does not suit the model, or a step exceeds the memory."""
    try:
        variant = setup.with_settings(settings)
        rows, seq = variant.batch.ids.shape
        variant.plan.check(variant.model, rows=rows, seq=seq, group=variant.batch.group)
    except ValueError:
        return None
    states = variant.states()
    if sum(local for local, _ in state_bytes(states).values()) > memory:
        return None  # The state alone is too large, so no trace is needed.
    size = step_bytes(states, variant.model, variant.batch, platform).total
    if size > memory:
        return None
    changed = {path: value for path, value in settings.items() if attrgetter(path)(setup) != value}
    return SmallerSetup(changed, variant, size)


def _format_settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{path}={value!r}" for path, value in settings.items())


def _format_candidate(candidate: Candidate) -> str:
    sizes = {axis: size for axis, size in parallel.axis_sizes(candidate.plan.mesh).items() if size > 1}
    return f"mesh {sizes}, " + _format_settings({"plan.zero": candidate.plan.zero, "execution.remat": candidate.remat})


def out_of_memory_report(
    error: BaseException,
    setup: TrainingSetup,
    *,
    format_plan: FormatPlan = _format_candidate,
    format_settings: FormatSettings = _format_settings,
) -> str | None:
    """Return an explanation of an out-of-memory error of a training step; None for an error of another kind.

    The report states the bytes that were requested, the bytes that the device has, the bytes that the setup holds by
    formulas, and up to three setups that would fit.

    Args:
        error: The error, such as the `JaxRuntimeError` of a step.
        setup: The setup that was trained.
        format_plan: Formats a proposed plan with another mesh.
        format_settings: Formats the changed settings of a proposed setup with the same mesh.
    """
    if (requested := requested_bytes(error)) is None:
        return None
    device, states = jax.local_devices()[0], setup.states()
    available = (device.memory_stats() or {}).get("bytes_limit")
    platform = "tpu" if device.platform == "tpu" else "cuda"  # CPUs have no formulas of their own, so CUDA's are used.
    step = step_bytes(states, setup.model, setup.batch, platform)
    causes = ", ".join(f"{name} {gigabytes(size)}" for name, size in step.held.items() if size)
    heading = f"a device ({device.device_kind}) is out of memory"
    heading += f": the program requested {gigabytes(requested)} at once" if requested else ""
    heading += f"; all programs together may use {gigabytes(available)}" if available else ""
    lines = [heading, f"by formulas, a step of this run holds {gigabytes(step.total)} on each device: {causes}"]
    # The step did not fit, even if formulas say that it does. So propose setups that hold at least a tenth less.
    memory = min(available or step.total, step.total * 9 // 10)
    proposals = []
    if setup.plan.mesh.size > 1:
        target = DeviceMemory(memory, platform)
        search = search_plans(states, setup.model, setup.batch, target, limit=1, max_traced=_MAX_TRACED)
        proposals = [f"  {format_plan(plan.candidate)}: {gigabytes(plan.held)}" for plan in search.proposals]
    for smaller in find_smaller_setups(setup, memory, platform, limit=3 - len(proposals)):
        proposals.append(f"  {format_settings(smaller.settings)}: {gigabytes(smaller.held)}")
    if proposals:
        return "\n".join([*lines, f"by formulas, a step would hold at most {gigabytes(memory)} with", *proposals])
    advice = "take more devices, a model of fewer layers, or a batch of fewer rows or tokens"
    return "\n".join([*lines, f"no setup was found that holds at most {gigabytes(memory)} by formulas: {advice}"])
