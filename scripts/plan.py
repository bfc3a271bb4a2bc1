"""What a run will be on accelerators that are not here: `python scripts/plan.py --recipe NAME --topology v5e:16x16`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare([*sys.argv, "--simulate", "1"])  # nothing runs, so JAX needs no accelerator of its own

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro
from recipes import Recipe
from support.check import check
from support.command import parse
from support.fitting import choices, gigabytes
from support.flags import naming_flags
from support.mesh import abstract_plan, check_plan, check_sizes, flags, mesh_line, state_of
from support.pictures import draw_costs
from support.screen import one_message
from support.setup import batch_shapes, optimizer_of

from eqformer import nn, planning, training


@dataclasses.dataclass(frozen=True)
class Command:
    """Tell what a run will hold, send and take on accelerators that are not here: give the flags of pretrain.py.

    All is by formulas from shapes; nothing runs, so a pod can be examined on any machine.
    """

    recipe: str
    """The recipe to start from, or a preset of eqformer.models: --recipe llama-3-8b."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    topology: str = "h100:8"
    """The accelerators: v5e:16x16, v5p:8x8x16, v6e:16x16, tpu7x:4x4x4, or GPUs of a machine x machines, h100:8x4."""
    search: bool = False
    """Rank meshes over all the devices by the time of a step, in place of the mesh that is given."""
    json: bool = False
    """Print JSON."""
    picture: Path | None = None
    """Draw memory by cause and time by cause to this PNG."""
    run_dir: Path | None = None
    """Accepted, since pretrain.py has it, and ignored."""


# The flags that pretrain.py does not have, with their descriptions for `--help`.
OWN = {
    "--topology NAME:SHAPE": "v5e:16x16, v5p:8x8x16, tpu7x:4x4x4, h100:8x4",
    "--search": "rank all meshes by the time of a step",
    "--json": "print JSON",
    "--picture FILE": "draw memory and time by cause to this PNG",
}
IGNORED = ("the run",)  # groups of flags in `--help` that change nothing in the report
OFFERED = 5  # the most meshes that a search lists


def tell(command: Command) -> None:
    """Print what is asked for."""
    recipe, topology = command.run, planning.topology(command.topology)
    check_sizes(recipe)
    model, batch = check(recipe), batch_shapes(recipe)
    states = state_of(recipe, abstract_plan(recipe), optimizer_of(recipe, model), model)
    if command.search:
        search(command, states, model, topology)
        return
    try:
        topology.speeds(states.plan.mesh)
    except ValueError as error:
        raise ValueError(f"{flags(recipe) or '--mesh'} --topology {topology}: {error}") from error
    check_plan(recipe, states.plan, model)
    found = planning.forecast(states, model, batch, topology)
    if command.json:
        print(json.dumps({"recipe": command.recipe, "flags": flags(recipe)} | found.as_dict(), indent=1))
    else:
        print(_report(states, found))
        if found.missing:
            print(_instead(recipe, states, model, found))
    if command.picture is not None:
        draw_costs(found.held, found.topology.accelerator.memory, found.time.by_cause, command.picture)


def search(command: Command, states: training.PlannedState, model: nn.Transformer, topology: planning.Topology) -> None:
    """Print the meshes that fit and take the least time."""
    recipe = command.run
    offered = planning.best_plans(states, model, batch_shapes(recipe), topology, most=OFFERED)
    if not offered:
        raise ValueError(
            f"--search --topology {topology}: no mesh was found that fits into {gigabytes(topology.accelerator.memory)}"
            " a device; take more devices, more --microbatches, a smaller --batch or --seq, or a smaller model."
        )
    if command.json:
        print(json.dumps([{"flags": choices(recipe, one.candidate)} | one.as_dict() for one in offered], indent=1))
        return
    rows = [("seconds", "MFU", "held", "bound by", "flags")]
    rows += [
        (f"{its.time.seconds:.3f}", f"{its.time.utilization:.1%}", gigabytes(its.held), its.time.bound)
        + (choices(recipe, its.candidate),)
        for its in offered
    ]
    print(f"{topology}, {topology.devices} devices, by formulas\n{nn.format_table(rows)}")


def _report(states: training.PlannedState, found: planning.Forecast) -> str:
    time, memory = found.time, found.topology.accelerator.memory
    head = f"{found.topology}; {mesh_line(states.plan)}; {found.parameters:,} parameters"
    rows = [("a device holds", "", "of its memory")]
    sizes = {**found.held, "sum": found.total}
    rows += [(name, gigabytes(size), f"{size / memory:.1%}") for name, size in sizes.items()]
    verdict = f"does not fit: {gigabytes(found.missing)} too much" if found.missing else "fits"
    verdict += f", of {gigabytes(memory)}, before what the compiler needs to work in"
    lines = [f"{head}; by formulas, nothing compiled", "", nn.format_table(rows), verdict, ""]
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


def _instead(recipe: Recipe, states: training.PlannedState, model: nn.Transformer, found: planning.Forecast) -> str:
    offered = planning.best_plans(states, model, batch_shapes(recipe), found.topology)
    if not offered:
        return "no other mesh over these devices was found that fits; take more devices, or a smaller --batch or --seq"
    said = (f"  {choices(recipe, one)}: {gigabytes(held)}, {time.seconds:.3f} s a step" for one, held, time in offered)
    return "\n".join(["as many devices would hold it by", *said])


def main(arguments: list[str]) -> None:
    """Run the command; bad input ends it with one message and exit code 2."""
    with one_message():
        command = parse(Command, arguments, OWN, IGNORED)
        with naming_flags(command):
            tell(command)


if __name__ == "__main__":
    main(sys.argv[1:])
