"""The words of plan.py: what a plan would be by formulas, and what its program is."""

import collections
from typing import Any

from eqformer import nn, parallel, planning
from support.fitting import gigabytes


def forecast_text(found: planning.Forecast, mesh: str) -> str:
    """What formulas say of a step."""
    time, memory = found.time, found.topology.accelerator.memory
    rows = [("a device holds", "", "of its memory")]
    sizes = {**found.held, "sum": found.total}
    rows += [(name, gigabytes(size), f"{size / memory:.1%}") for name, size in sizes.items()]
    verdict = f"does not fit: {gigabytes(found.missing)} too much" if found.missing else "fits"
    head = f"{found.topology}; {mesh}; {found.parameters:,} parameters\n\nby formulas:"
    on_host = f"; {gigabytes(found.on_host)} in the host's memory, there and back each step" if found.on_host else ""
    lines = [head, nn.format_table(rows), f"{verdict}, of {gigabytes(memory)}{on_host}", ""]
    rows = [("over", "a device sends in a step", "bytes")]
    rows += [(cause, what, gigabytes(size)) for cause, what, size in found.sent]
    lines += [nn.format_table(rows) if found.sent else "nothing is sent between devices", ""]
    rows = [("a step, by roofline", "seconds", "")]
    beside = {cause: "beside products" for cause in time.hidden}
    rows += [(cause, f"{seconds:.4f}", beside.get(cause, "")) for cause, seconds in time.by_cause.items()]
    rows += [("bubble of the pipeline", f"{time.bubble:.1%}", "")] * (time.bubble > 0)
    rows.append(("in all", f"{time.seconds:.4f}", f"bound by {time.bound}"))
    lines.append(nn.format_table(rows))
    lines.append(f"{found.operations:.4g} operations of the model a device and step: an MFU of {time.utilization:.1%}")
    return "\n".join(lines)


def program_text(made: planning.Compilation, found: planning.Forecast) -> str:
    """What the compiler made of a step."""
    one, seconds = found.topology.accelerator, f"{made.seconds:.0f} s" + " (an earlier run's)" * made.is_kept
    if (program := made.program) is None:
        return f"compiled in {seconds}: does not fit: {made.failure}"
    held = program.argument + program.temporary
    verdict = "fits" if held <= one.memory else f"does not fit: {gigabytes(held - one.memory)} too much"
    on_host = f" ({gigabytes(program.on_host)} more on the host)" if program.on_host else ""
    lines = [
        f"compiled in {seconds}: {verdict}, of {gigabytes(one.memory)}",
        f"arguments {gigabytes(program.argument)}{on_host}, temporaries {gigabytes(program.temporary)}, at most "
        f"{gigabytes(program.peak)} at once; by formulas {gigabytes(found.total)} in all",
    ]
    if program.unread:
        return "\n".join([*lines, f"its text was not had: {program.unread}"])
    rows = [("largest temporaries", "", "of")]
    rows += [
        (each.type, gigabytes(each.size), planning.module_of(each.scopes) or "(unnamed)") for each in program.buffers
    ]
    waste = program.operations / found.operations
    lines += [nn.format_table(rows), f"{program.operations:.4g} operations of products, {waste:.2f} of the model's own"]
    if program.cycles and one.clock:
        busy = program.cycles / one.clock
        share = f"an MFU of {found.time.of_model / busy:.1%} before what waits for links"
        lines.append(f"{program.cycles:,} cycles by its estimate, {busy:.4f} s at {one.clock / 1e9:.2f} GHz: {share}")
    of_held = f", {program.moved / found.total:.2f} of weights and caches" if "caches" in found.held else ""
    lines.append(f"reads and writes {gigabytes(program.moved)} of main memory{of_held}")
    sent, hidden, predicted = program.sent, program.hidden, sum(size for *_, size in found.sent)
    lines.append(f"sends {gigabytes(sent)}, {gigabytes(hidden)} beside other work; by formulas {gigabytes(predicted)}")
    return "\n".join([*lines, _sent_table(program)] if program.transfers else lines)


def held_text(made: planning.Compilation | None) -> str:
    """The bytes of a program's arguments and temporaries; nothing where nothing was compiled."""
    if made is None or made.program is None:
        return "" if made is None else made.failure
    return gigabytes(made.program.argument + made.program.temporary)


def _sent_table(program: planning.Program) -> str:
    groups: dict[tuple[str, str, str, bool], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for each in program.transfers:
        over = f"{each.devices} devices" if each.axes is None else " x ".join(each.axes)
        name = each.named(parallel.COLLECTIVES) or "the partitioner's"
        group = groups[each.kind, over, name, each.hidden]
        group[0] += each.times or 1
        group[1] += each.sent * (each.times or 1)
    rows: list[tuple[str, ...]] = [("collective", "over", "name", "times", "bytes", "")]
    for (kind, over, name, hidden), (times, size) in sorted(groups.items(), key=lambda its: -its[1][1]):
        rows.append(
            (kind, over, name, f"{times:.0f}", gigabytes(size), "beside other work" if hidden else "waited for")
        )
    return nn.format_table(rows[:13])


def compilation_dict(made: planning.Compilation) -> dict[str, Any]:
    """What a compilation gave, as plain data."""
    program, whole = made.program, {}
    if program is not None:
        whole = program.as_dict()
        for row, each in zip(whole["transfers"], program.transfers, strict=True):
            row["name"] = each.named(parallel.COLLECTIVES)
    return {"seconds_to_compile": made.seconds, "kept": made.is_kept, "failure": made.failure, **whole}
