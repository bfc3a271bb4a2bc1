"""What is known of a step as text: tables of what it holds, sends and takes, by formulas and as it was compiled."""

from collections.abc import Iterable, Mapping

from ..nn import format_table
from ..parallel import COLLECTIVES, STATE
from ..program import CompiledCosts, module_of
from ._absent import Compilation
from ._accelerators import Accelerator
from ._counted_bytes import communication_table
from ._forecast import Forecast, read_by_decoding
from ._sent_bytes import Sent
from ._temporary_bytes import StepBytes
from ._verdict import Verdict


def gigabytes(size: int | float) -> str:
    """`80.0 GB`, of 10^9 bytes."""
    return f"{size / 10**9:,.{1 if size >= 10**10 else 3}f} GB"


def held_table(state: Mapping[str, tuple[int, int]], step: StepBytes) -> str:
    """What a device holds, and what share of all that is: `state_bytes`, then `step_bytes` and their sum."""
    rows = [("bytes", "a device", "of", "share")]
    rows += [(name, f"{own:,}", f"{whole:,}", f"{own / max(whole, 1):.1%}") for name, (own, whole) in state.items()]
    stays = ("parameters", "optimizer state")
    rows += [(f"in a step: {name}", f"{size:,}", "", "") for name, size in step.held.items() if name not in stays]
    rows.append(("sum when it is most", f"{step.total:,}", "", ""))
    return format_table(rows)


def sent_table(sent: Iterable[Sent]) -> str:
    """What a device sends in a step, by cause, and the sum: of `sent_bytes`."""
    sent = tuple(sent)
    if not sent:
        return "nothing is sent between devices"
    rows = [("over", "what", "bytes sent a device and step")]
    rows += [(cause, what, f"{size:,.0f}") for cause, what, size in sent]
    rows.append(("sum", "", f"{sum(size for *_, size in sent):,.0f}"))
    return format_table(rows)


def forecast_table(found: Forecast) -> str:
    """What formulas say of a step: what a device holds and whether it fits, what it sends, and its seconds by cause."""
    memory, on_host = found.topology.accelerator.memory, ""
    if found.on_host:
        on_host = f"; {gigabytes(found.on_host)} in the host's memory, there and back each step"
    rows = [("a device holds", "", "of its memory")]
    sizes = {**found.held, "sum": found.total}
    rows += [(name, gigabytes(size), f"{size / memory:.1%}") for name, size in sizes.items()]
    verdict = _verdict_line(found.verdict, found.total, found.topology.accelerator)
    lines = [format_table(rows), f"{verdict}{on_host}", ""]
    rows = [("over", "a device sends in a step", "bytes")]
    rows += [(cause, what, gigabytes(size)) for cause, what, size in found.sent]
    lines += [format_table(rows) if found.sent else "nothing is sent between devices", "", _time_table(found)]
    lines.append(
        f"{found.operations:.4g} operations of the model a device and step: an MFU of at most "
        f"{found.time.utilization:.1%}"
    )
    return "\n".join(lines)


def _time_table(found: Forecast) -> str:
    time = found.time
    rows = [("a step, by roofline", "seconds", "")]
    beside = dict.fromkeys(time.hidden, "beside products")
    beside |= {STATE: f"beside products, but for {time.waited:.4f}"} if time.waited else {}
    rows += [(cause, f"{seconds:.4f}", beside.get(cause, "")) for cause, seconds in time.by_cause.items()]
    rows += [("bubble of the pipeline", f"{time.bubble:.1%}", "")] * (time.bubble > 0)
    return format_table([*rows, ("in all", f"{time.seconds:.4f}", f"bound by {time.bound}")])


def _verdict_line(verdict: Verdict, held: int, accelerator: Accelerator) -> str:
    """Return a verdict with the bytes that decide it."""
    share = f" that JAX takes of {gigabytes(accelerator.whole)}" if accelerator.whole else ""
    of_memory = f"of {gigabytes(accelerator.memory)}{share}"
    if verdict == "does not fit":
        return f"{verdict}: {gigabytes(held - accelerator.memory)} too much, {of_memory}"
    return f"{verdict}, {of_memory}" if verdict == "fits" else f"{verdict}: {gigabytes(held)} by formulas, {of_memory}"


def compilation_table(made: Compilation, found: Forecast) -> str:
    """What a compiler made of a step, beside what formulas said: what it holds, computes, moves and sends."""
    seconds = f"{made.seconds:.0f} s" + " (an earlier run's)" * made.is_kept
    if (program := made.program) is None:
        return f"compiled in {seconds}: does not fit: {made.failure}"
    on_host = f" ({gigabytes(program.on_host)} more on the host)" if program.on_host else ""
    accelerator = found.topology.accelerator
    verdict: Verdict = "fits" if made.fits(accelerator.memory) else "does not fit"
    lines = [
        f"compiled in {seconds}: {_verdict_line(verdict, program.held, accelerator)}",
        f"arguments {gigabytes(program.argument)}{on_host}, temporaries {gigabytes(program.temporary)}, at most "
        f"{gigabytes(program.peak)} at once; by formulas {gigabytes(found.total)} in all",
    ]
    if program.unread:
        return "\n".join([*lines, f"its text was not had: {program.unread}"])
    return "\n".join([*lines, *_read_lines(program, found)])


def _read_lines(program: CompiledCosts, found: Forecast) -> list[str]:
    """What is read off a program's text."""
    one = found.topology.accelerator
    rows = [("largest temporaries", "", "of")]
    rows += [(each.type, gigabytes(each.size), module_of(each.scopes) or "(unnamed)") for each in program.buffers]
    waste = program.operations / found.operations
    lines = [format_table(rows), f"{program.operations:.4g} operations of products, {waste:.2f} of the model's own"]
    if program.cycles and one.clock:
        busy = program.cycles / one.clock
        share = f"an MFU of at most {found.time.of_model / busy:.1%} before what waits for links"
        lines.append(f"{program.cycles:,} cycles by its estimate, {busy:.4f} s at {one.clock / 1e9:.2f} GHz: {share}")
    needed = read_by_decoding(found.held)
    of_held = f", {program.moved / needed:.2f} of weights and caches" if "caches" in found.held else ""
    lines.append(f"reads and writes {gigabytes(program.moved)} of main memory{of_held}")
    sent, hidden, predicted = program.sent, program.hidden, sum(size for *_, size in found.sent)
    lines.append(f"sends {gigabytes(sent)}, {gigabytes(hidden)} beside other work; by formulas {gigabytes(predicted)}")
    return [*lines, communication_table(program.transfers, names=COLLECTIVES)] if program.transfers else lines
