"""Tables and a figure of a plan's costs: bytes held and sent, seconds, what the compiler says, and plans that fit."""

import collections
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path

from .._failures import load_extra
from ..nn import format_table
from ..parallel import COLLECTIVES, STATE
from ..program import bytes_sent, CompiledCosts, module_of, Transfer
from ._accelerators import Accelerator
from ._compile import Compilation
from ._forecast import decode_read_bytes, Forecast, topology_of
from ._held_bytes import Verdict
from ._roofline import Roofline
from ._search import Candidate, DecodePlan, PlanSearch, Proposal
from ._sent_bytes import Sent


FormatPlan = Callable[[Candidate], str]
"""A function that returns the command-line flags of a plan."""


def gigabytes(size: int | float) -> str:
    """Format bytes as `80.0 GB`, of 10^9 bytes."""
    return f"{size / 10**9:,.{1 if size >= 10**10 else 3}f} GB"


def parse_bytes(text: str) -> int:
    """Parse a size, such as `80GB` or `80G`, and return its bytes.

    Raises a `ValueError` for anything else, such as a number without a unit.
    """
    match = re.fullmatch(r"([\d.]+) ?(?:([kmgt])(i?)b?|b)", text.strip(), re.IGNORECASE)
    try:
        power = 0 if match is None or not match[2] else " kmgt".index(match[2].lower())
        size = 0.0 if match is None else float(match[1]) * (1024 if match[3] else 1000) ** power
    except ValueError:  # a number with more than one point
        size = 0.0
    if not size >= 1:
        raise ValueError(
            f"parse_bytes({text!r}): give a device's memory as a number and a unit, such as 80GB or 80G (10^9 "
            "bytes), or 141GiB or 141Gi (2^30 bytes)."
        )
    return int(size)


def forecast_table(forecast: Forecast) -> str:
    """Format a forecast: the bytes that a device holds and sends, whether they fit, and the seconds of a step."""
    lines = [held_table(forecast)]
    on_host = ""
    if forecast.on_host:
        on_host = f"{gigabytes(forecast.on_host)} in the host's memory, copied to and from it in each step"
    if forecast.verdict is not None and forecast.memory is not None:
        topology = topology_of(forecast.target)
        accelerator = None if topology is None else topology.accelerator
        verdict = _verdict_line(forecast.verdict, forecast.total, forecast.memory, accelerator)
        lines.append("; ".join(filter(None, [verdict, on_host])))
    elif on_host:
        lines.append(on_host)
    lines += ["", sent_table(forecast.sent)]
    operations = f"{forecast.operations:.4g} operations of the model per device and step"
    if forecast.roofline is None:
        return "\n".join([*lines, "", operations])
    mfu = f"an MFU of at most {forecast.roofline.utilization:.1%}"
    return "\n".join([*lines, "", _time_table(forecast.roofline), f"{operations}: {mfu}"])


def held_table(forecast: Forecast) -> str:
    """Format the bytes that a device holds, by cause: first the training state, then a step at its peak.

    The first rows also state the bytes on all devices together, and the device's share. The sum counts parameters,
    optimizer state, and everything else that is held at the peak of a step; gradients count only if they exist then.
    """
    rows = [("a device holds", "", "bytes", "of", "share", "of its memory")]
    for cause, (local, size) in forecast.state.items():
        share = f"{local / max(size, 1):.1%}"
        rows.append((cause, gigabytes(local), f"{local:,}", f"{size:,}", share, _share_of(forecast.memory, local)))
    step = forecast.held
    if forecast.state:  # The rows above list parameters and optimizer state already.
        listed = ("parameters", "optimizer state")
        step = {f"in a step: {cause}": size for cause, size in step.items() if cause not in listed}
    for cause, size in {**step, "sum at the peak of a step": forecast.total}.items():
        rows.append((cause, gigabytes(size), f"{size:,}", "", "", _share_of(forecast.memory, size)))
    return format_table(rows)


def _share_of(memory: int | None, size: int) -> str:
    return "" if memory is None else f"{size / memory:.1%}"


def sent_table(sent: Iterable[Sent]) -> str:
    """Format the bytes that a device sends in a step, by cause, and the sum."""
    sent = tuple(sent)
    if not sent:
        return "nothing is sent between devices"
    rows = [("over", "a device sends in a step", "", "bytes")]
    rows += [(item.cause, item.what, gigabytes(item.size), f"{item.size:,.0f}") for item in sent]
    total = sum(size for *_, size in sent)
    rows.append(("sum", "", gigabytes(total), f"{total:,.0f}"))
    return format_table(rows)


def _time_table(time: Roofline) -> str:
    rows = [("a step, by roofline", "seconds", "")]
    notes = dict.fromkeys(time.hidden, "overlaps with products")
    notes |= {STATE: f"overlaps with products, except for {time.exposed_state:.4f}"} if time.exposed_state else {}
    rows += [(cause, f"{seconds:.4f}", notes.get(cause, "")) for cause, seconds in time.by_cause.items()]
    if time.bubble > 0:
        rows.append(("bubble of the pipeline", f"{time.bubble:.1%}", ""))
    return format_table([*rows, ("in all", f"{time.seconds:.4f}", f"bound by {time.bound}")])


def _verdict_line(verdict: Verdict, held: int, memory: int, accelerator: Accelerator | None) -> str:
    """Return a line with the verdict and the bytes that decide the verdict."""
    share = f", JAX's share of {gigabytes(accelerator.whole)}" if accelerator and accelerator.whole else ""
    limit = f"{gigabytes(memory)}{share}"
    if verdict == "does not fit":
        return f"{verdict}: {gigabytes(held - memory)} more than {limit}"
    return f"{verdict} in {limit}" if verdict == "fits" else f"{verdict}: {gigabytes(held)} by formulas, of {limit}"


def compilation_table(compilation: Compilation, forecast: Forecast) -> str:
    """Format the costs of a compiled step (bytes, operations, communication) beside the figures of formulas."""
    topology = topology_of(forecast.target)
    assert topology is not None
    seconds = f"{compilation.seconds:.0f} s{' (by an earlier run)' if compilation.from_cache else ''}"
    if (program := compilation.program) is None:
        return f"compiled in {seconds}: does not fit: {compilation.failure}"
    on_host = f" ({gigabytes(program.on_host)} more on the host)" if program.on_host else ""
    accelerator = topology.accelerator
    verdict: Verdict = "fits" if compilation.fits(accelerator.memory) else "does not fit"
    lines = [
        f"compiled in {seconds}: {_verdict_line(verdict, program.held, accelerator.memory, accelerator)}",
        f"arguments {gigabytes(program.argument)}{on_host}, temporaries {gigabytes(program.temporary)}, at most "
        f"{gigabytes(program.peak)} at once; by formulas {gigabytes(forecast.total)} in all",
    ]
    if program.unread:
        return "\n".join([*lines, f"the compiled program's text is not available: {program.unread}"])
    return "\n".join([*lines, *_program_lines(program, forecast, accelerator)])


def _program_lines(program: CompiledCosts, forecast: Forecast, accelerator: Accelerator) -> list[str]:
    """Return the lines with figures from the text of a compiled program."""
    rows = [("largest temporaries", "", "of")]
    rows += [
        (buffer.type, gigabytes(buffer.size), module_of(buffer.scopes) or "(unnamed)") for buffer in program.buffers
    ]
    waste = program.operations / forecast.operations
    lines = [format_table(rows), f"{program.operations:.4g} operations of products, {waste:.2f} times the model's own"]
    if program.cycles and accelerator.clock:
        busy = program.cycles / accelerator.clock
        mfu = f"an MFU of at most {forecast.time.of_model / busy:.1%} if the device never waits for links"
        lines.append(
            f"{program.cycles:,} cycles by the compiler's estimate, {busy:.4f} s at {accelerator.clock / 1e9:.2f} GHz: "
            f"{mfu}"
        )
    needed = decode_read_bytes(forecast.held)
    ratio = f", {program.moved / needed:.2f} times the weights and caches" if "caches" in forecast.held else ""
    lines.append(f"reads and writes {gigabytes(program.moved)} of main memory{ratio}")
    predicted = sum(size for *_, size in forecast.sent)
    overlap = f"{gigabytes(program.hidden)} overlap with other work"
    lines.append(f"sends {gigabytes(program.sent)} ({overlap}); by formulas {gigabytes(predicted)}")
    return [*lines, communication_table(program.transfers, names=COLLECTIVES)] if program.transfers else lines


_HEADING = "plans for the same number of devices, by formulas:"


def format_search(search: PlanSearch, format_plan: FormatPlan) -> str:
    """Format the plans that `search_plans` proposes or, if nothing fits, what is too large."""
    if search.proposals:
        return "\n".join([_HEADING, *(_proposal_line(proposal, format_plan) for proposal in search.proposals)])
    if search.smallest is None:
        return (
            f"no mesh of this number of devices was found that fits, of {search.meshes} possible meshes: the state "
            f"alone (parameters, gradients, optimizer) takes at least {gigabytes(search.smallest_state)}; take more "
            "devices, or a smaller model (the batch and its division into microbatches do not change the state)"
        )
    candidate, step = search.smallest
    stopped = f"; of {search.candidates} plans ranked by formulas, only the first {search.traced} were traced"
    return (
        f"no mesh of this number of devices was found that fits: the state takes {gigabytes(candidate.state)} and fits "
        f"alone, but the temporaries of a step take at least {gigabytes(step.estimate - candidate.state)} more"
        f"{stopped if search.traced < search.candidates else ''}; take more devices, more microbatches, or a smaller "
        "batch or shorter rows"
    )


def _proposal_line(proposal: Proposal, format_plan: FormatPlan) -> str:
    costs = [gigabytes(proposal.held), f"sends {gigabytes(proposal.candidate.sent)} a step"]
    if proposal.time is not None:
        costs.append(f"at least {proposal.time.seconds:.3f} s a step")
    # The estimate of every proposed plan fits. If the estimate with its margin does not fit, only the compiler can
    # tell, and the verdict says so.
    if proposal.verdict not in (None, "fits"):
        costs.append(proposal.verdict)
    return f"  {format_plan(proposal.candidate)}: {', '.join(costs)}"


def format_decode_plans(plans: Sequence[DecodePlan], format_plan: Callable[[DecodePlan], str]) -> str:
    """Format the plans that `search_decode_plans` returns."""
    if not plans:
        return "no mesh over these devices was found that fits even with one row; take more devices, or shorter rows"
    lines = [_HEADING]
    for plan in plans:
        total, seconds = plan.forecast.total, plan.forecast.time.seconds
        lines.append(f"  {format_plan(plan)}: {gigabytes(total)}, {seconds:.4f} s per token of each row")
    return "\n".join(lines)


def ranking_table(
    proposals: Sequence[Proposal],
    compilations: Sequence[Compilation | None],
    format_plan: FormatPlan,
    memory: int,
) -> str:
    """Format the plans that `search_plans` found for a topology, by rank, with the costs of compiled plans.

    As in every roofline, the seconds are a lower bound, and the MFU is an upper bound.

    Args:
        proposals: The plans.
        compilations: The compilation of each plan; None: the plan was not compiled.
        format_plan: Returns a plan's flags.
        memory: Bytes of a device.
    """
    rows = [("seconds", "MFU", "held", "compiled", "verdict", "bound by", "flags")]
    for proposal, compilation in zip(proposals, compilations, strict=True):
        assert proposal.time is not None
        seconds, share = f">= {proposal.time.seconds:.3f}", f"<= {proposal.time.utilization:.1%}"
        size = gigabytes(proposal.held) if proposal.verdict else f">= {gigabytes(proposal.held)}"
        verdict, compiled = proposal.verdict or "not traced yet", ""
        if compilation is not None:
            program = compilation.program
            compiled = compilation.failure if program is None else gigabytes(program.held)
            verdict = "fits" if compilation.fits(memory) else "does not fit"
        flags = format_plan(proposal.candidate)
        rows.append((seconds, share, size, compiled, verdict, proposal.time.bound, flags))
    return format_table(rows)


def communication_table(transfers: Iterable[Transfer], *, names: Container[str] = ()) -> str:
    """Format the bytes that a program sends by kind, axes and name, largest first, and the sum.

    Only names in `names` are shown. `+?` after a figure means that it is too low, because a loop of unknown length is
    not counted.
    """
    groups: dict[tuple[str, str, str, str], list[Transfer]] = collections.defaultdict(list)
    for transfer in transfers:
        over = f"{transfer.devices} devices" if transfer.axes is None else " x ".join(transfer.axes)
        overlap = "overlaps with other work" if transfer.hidden else ""
        groups[transfer.kind, over, transfer.named(names) or "", overlap].append(transfer)
    groups = dict(sorted(groups.items(), key=lambda item: -_sum_known(item[1])[1]))
    groups["all", "", "", ""] = [transfer for group in groups.values() for transfer in group]
    rows: list[tuple[str, ...]] = [("operation", "over", "times", "bytes sent per device", "name", "")]
    for (kind, over, name, overlap), group in groups.items():
        (times, size), plus = _sum_known(group), "+?" if any(transfer.times is None for transfer in group) else ""
        rows.append((kind, over, f"{times}{plus}", f"{size:,.0f}{plus}", name, overlap))
    return format_table(rows)


def _sum_known(transfers: Iterable[Transfer]) -> tuple[int, float]:
    """Return the number of executions and the bytes of all transfers that are executed a known number of times."""
    known = [transfer for transfer in transfers if transfer.times is not None]
    return sum(transfer.times or 0 for transfer in known), bytes_sent(known)


def plot_costs(held: Mapping[str, int], memory: int, seconds: Mapping[str, float], path: str | Path) -> None:
    """Write a PNG of the bytes of a device by cause beside the `memory` that it has, and of a step's seconds by cause.

    A `Forecast` has both, as `held` and `time.by_cause`. Needs matplotlib.
    """
    figures = load_extra("matplotlib.figure", extra="train", call="plot_costs(held, memory, seconds, path)")
    figure = figures.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    memory_axes, time_axes = figure.subplots(1, 2)
    panels = ((memory_axes, held, 1e-9, "GB per device"), (time_axes, seconds, 1.0, "seconds per step"))
    for axes, costs, scale, label in panels:
        names, sizes = list(costs), [scale * size for size in costs.values()]
        axes.barh(names[::-1], sizes[::-1], color="#1f4e79")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25, axis="x")
    memory_axes.axvline(memory * 1e-9, color="#c8552b", label="memory of a device")
    memory_axes.legend(frameon=False)
    figure.savefig(path, format="png")
