"""The bytes of a step's temporaries when they are most, by walking through its traced program as compilers run it."""

from collections.abc import Collection
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from .. import kernels, nn, training
from .._shapes import Batch, is_shape
from ..program import carry_of, host_bytes, Line, Lines, needed, of_platform, per_device
from ._accelerators import for_platform
from ._temporary_cuda import beside_loops, born_early, copied_bytes, gradients_last, kept_twice, last_in_flight
from ._temporary_tpu import before_loops, cast_before_sent, relaid_bytes, tpu_uses
from ._traced_uses import IN_PLACE, Uses, WRITTEN


GATHERED, GRADIENTS, KEPT, WORK = "gathered parameters", "gradients", "kept for the backward pass", "worked on"


class StepBytes(NamedTuple):
    """The bytes of a step when they are most."""

    held: dict[str, int]
    """On a device, by cause."""
    on_host: int
    """Kept in the memory of the device's host for the backward pass, where the model's `remat` has it so."""

    @property
    def total(self) -> int:
        """All on a device."""
        return sum(self.held.values())


def temporary_bytes(states: training.PlannedState, model: nn.LanguageModel, batch: Batch, platform: str) -> StepBytes:
    """Bytes that a device needs beside parameters and optimizer state when they are most, by cause.

    The loss and its gradients are traced for one device, and the trace is walked through as XLA's compilers for
    `platform` (`tpu` or `cuda`) schedule it: elementwise results that only elementwise operations and sums read are
    never written, but for what a convolution gives to more than one line, sums and updates take the place of what
    nothing reads any more, a product that is only added is added in place, and a branch's results are in the place of
    what they are written over, if in any. On TPUs a cast that is cast back is not made, an update lays out anew what
    was made in parts, what loops cast turn by turn is cast before them, and products compute elementwise operands, and
    write what is only cast as it is cast to. On GPUs what layers' gradients are added to is made with the first zeros,
    as are other zeros of the same shape, arrays that are gathered along another dim than their first are held once
    more, and what is sent runs beside other lines: parameters are gathered a turn early, so that what the last turn
    keeps is beside what others have kept until it is read, and gradients, made at the end of a turn, are scattered one
    after another, each beside the next two products.
    """
    found, on_host = [StepBytes({}, 0)], 0
    for jaxpr in _traced(states, model, batch, platform):
        most = peak(jaxpr, platform)
        held: dict[str, int] = {}
        for cause, size in most.there:
            held[cause] = held.get(cause, 0) + size
        if platform == "cuda":
            held[GATHERED] = held.get(GATHERED, 0) + copied_bytes(jaxpr)
        elif platform == "tpu" and (relaid := relaid_bytes(jaxpr, _moments(states))):
            found.append(StepBytes({GRADIENTS: _results_bytes(jaxpr), WORK: relaid}, 0))
        found.append(StepBytes(held, 0))
        on_host = max(on_host, host_bytes(jaxpr))
    return max(found, key=lambda one: one.total)._replace(on_host=on_host)


def _moments(states: training.PlannedState) -> int:
    """How many numbers the optimizer holds for a parameter, about."""
    shapes, size = (
        states.sharded_shapes(),
        lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree) if is_shape(leaf)),
    )
    return round(size(shapes.optimizer_state) / size(states.optimizer.trained(shapes.model)))


def _results_bytes(jaxpr: Any) -> int:
    program = Lines(jaxpr)
    return sum(program.size(value) for value in program.results if value is not None)


def _traced(states: training.PlannedState, model: nn.LanguageModel, batch: Batch, platform: str) -> list[Any]:
    """The programs of a loss and its gradients on each device of a platform, without what they do not need."""
    plan, trained = for_platform(states.plan, platform), states.optimizer.trained
    gradients = training.make_gradient_function(training.next_token_loss, plan, trained=trained)
    arrays, rest = eqx.partition(plan.shapes(model), is_shape)

    def run(arrays: PyTree, batch: Batch, key: Any) -> PyTree:
        return eqx.filter(gradients(eqx.combine(arrays, rest), batch, key), eqx.is_array)

    with kernels.traced_for(platform):
        traced = jax.make_jaxpr(run)(arrays, batch, jax.eval_shape(lambda: jax.random.key(0)))
    return [needed(of_platform(jaxpr, platform)) for jaxpr in per_device(traced.jaxpr)]


class Most(NamedTuple):
    """The bytes that a program makes when they are most, and what there is then, by cause."""

    size: int
    there: list[tuple[str, int]]


def peak(
    jaxpr: Any,
    platform: str,
    carried: tuple[int, int] | None = None,
    placed: Collection[int] = (),
    narrow_given: Collection[int] = (),
) -> Most:
    """What a program makes when it is most.

    Args:
        jaxpr: The program.
        platform: For which it is compiled.
        carried: Of a loop's body, where its carry begins and how long it is.
        placed: Of a branch, the numbers of the results that are in places which are there before it.
        narrow_given: The places of what it is given that is narrower in truth than its type, as it casts it back.
    """
    program = Lines(jaxpr)
    if platform == "cuda" and carried is not None:
        program.lines = gradients_last(program)
    uses, back, sizes = tpu_uses(program) if platform == "tpu" else (Uses(program), {}, {})
    places, early = born_early(uses, _added_in_place(uses)) if platform == "cuda" else (set(), {})
    last = last_in_flight(uses, carried is not None) if platform == "cuda" else uses.last
    sizes |= cast_before_sent(uses, carried) if platform == "tpu" else {}
    sent = beside_loops(program) if platform == "cuda" else before_loops(uses)
    kept = kept_twice(program) if platform == "cuda" else [0] * len(program.lines)
    size_of = lambda value: sizes.get(value, program.size(value))
    unwritten = {*uses.views, *uses.fused, *_added_in_place(uses), *_carried_in_place(uses, carried)}
    unwritten |= {line.writes[0] for line in program.lines if _casts(line, {program.given[n] for n in narrow_given})}
    unwritten |= _in_results(uses, placed)
    alive: dict[int, int] = {}
    most, there = 0, []
    for place, line in enumerate(program.lines):
        dying = {one for one in map(uses.root, line.reads) if one in alive and last(one) == place}
        made, late = [value for value in early.get(place, ()) if value not in unwritten], []
        for number, value in enumerate(line.writes):
            if value in unwritten or value in places:
                continue
            if (given := _overwritten(line, number, program, uses, dying)) is not None:
                dying.discard(given)
                del alive[given]
            elif line.name == "cond":  # what else its results are is made within the branch
                late.append(value)
                continue
            made.append(value)
        placed = [number for number, value in enumerate(line.writes) if value not in late]
        for values, inner in ((made, _inner(line, platform, back, placed)), (late, Most(0, []))):
            alive |= {value: size_of(value) for value in values if value not in alive}
            size = sum(alive.values()) + inner.size + sent[place] + kept[place]
            if size > most:
                most = size
                there = [(_cause(uses, value), own) for value, own in alive.items()] + inner.there
                there += [(GATHERED, sent[place]), (KEPT, kept[place])]
        alive = {value: own for value, own in alive.items() if last(value) > place}
    return Most(most, there)


def _inner(line: Line, platform: str, back: Collection[int], placed: Collection[int]) -> Most:
    """What loops and branches make inside."""
    if line.name == "scan":
        narrow = [number for number, value in enumerate(line.reads[: carry_of(line)[0]]) if value in back]
        return peak(line.params["jaxpr"].jaxpr, platform, carry_of(line), narrow_given=narrow)
    if line.name == "while":
        start = line.params["body_nconsts"]
        return peak(needed(line.params["body_jaxpr"].jaxpr), platform, (start, len(line.writes)))
    if line.name == "cond":
        runs = (peak(branch.jaxpr, platform, placed=placed) for branch in line.params["branches"])
        return max(runs, key=lambda run: run.size)
    return Most(0, [])


def _overwritten(line: Line, number: int, program: Lines, uses: Uses, dying: set[int]) -> int | None:
    """What is read for the last time by a line that writes a result of the same size in its place."""
    if line.name == "scan":
        start, length = carry_of(line)
        given = uses.root(line.reads[start + number]) if number < length else -1
        return given if given in dying else None
    if line.name == "ragged_all_to_all":  # into the array that it is given for this
        given = uses.root(line.reads[1])
        return given if given in dying else None
    if line.name in WRITTEN - IN_PLACE:
        return None
    size = program.size(line.writes[number])
    return next((one for one in dying if program.size(one) == size), None)


def _in_results(uses: Uses, placed: Collection[int]) -> set[int]:
    """Some of a branch's results, and what they are written over: all are in the places of the conditional's."""
    found: set[int] = set()
    for value in {uses.root(uses.program.results[number]) for number in placed}:
        while value in uses.made and value not in found:
            found.add(value)
            place = uses.made[value]
            line = uses.lines[place]
            dying = {one for one in map(uses.root, line.reads) if one in uses.made and uses.last(one) == place}
            given = _overwritten(line, line.writes.index(value), uses.program, uses, dying - found)
            value = -1 if given is None else given
    return found


def _carried_in_place(uses: Uses, carried: tuple[int, int] | None) -> set[int]:
    """A loop's next carries that take the place of those that nothing reads any more."""
    start, length = carried or (0, 0)
    program, found = uses.program, set()
    for given, result in zip(program.given[start : start + length], program.results):
        value = uses.root(result)
        if value in uses.made and uses.last(given) <= uses.made[value]:
            found.add(value)
    return found


def _added_in_place(uses: Uses) -> set[int]:
    """Products that are only added to an array of their size, and zeros that are scattered into to be added to one."""
    found = set()
    for value, place in uses.made.items():
        line, readers = uses.lines[place], uses.readers.get(value, [])
        if len(readers) != 1 or uses.lines[readers[0]].name not in ("add", "add_any") or value in uses.results:
            continue
        if line.name == "dot_general":
            others = [one for one in map(uses.root, uses.lines[readers[0]].reads) if one not in (value, -1)]
            if others and len(uses.readers.get(others[0], [])) == 1:
                found.add(value)
        elif line.name in ("scatter-add", "scatter_add"):
            zeros = uses.maker(line.reads[0])
            if zeros is not None and zeros.name == "broadcast_in_dim":
                found |= {value, uses.root(line.reads[0])}
    return found


def _casts(line: Line, given: Collection[int]) -> bool:
    return line.name == "convert_element_type" and line.reads[0] in given


def _cause(uses: Uses, value: int) -> str:
    line = uses.lines[uses.made[value]]
    source = uses.maker(line.reads[0]) if line.name == "convert_element_type" else line
    if (source or line).name == "all_gather" or ("parameters" in line.scopes and line.name == "convert_element_type"):
        return GATHERED
    is_carry = line.name == "scan" and value in line.writes[: carry_of(line)[1]]
    if "transpose" in line.scopes or line.name == "broadcast_in_dim" or (is_carry and uses.program.size(value) > 2**20):
        return GRADIENTS
    return KEPT if line.name == "scan" else WORK
