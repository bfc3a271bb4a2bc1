"""What a plan holds and sends, before anything runs: `python scripts/layout.py --mesh.fsdp 2 --mesh.tensor 4`."""

import math
import sys

from support import environment
from support.flags import given


def _devices(arguments: list[str]) -> list[str]:
    """The arguments with `--simulate` for as many devices as the mesh has, unless it is given."""
    flags = given(arguments)
    words = [word for flag, given in flags.items() if flag.startswith("--mesh.") for word in given[:1]]
    sizes = [int(word) for word in words if word.isdecimal()]
    return arguments if environment.simulated(flags) else [*arguments, "--simulate", str(max(1, math.prod(sizes)))]


if __name__ == "__main__":
    environment.prepare(_devices(sys.argv))

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh
from recipes import Recipe
from support.check import check
from support.command import entry
from support.mesh import abstract_plan, check_plan, choices, plan_of, state_of, step_of
from support.nearest import looking
from support.processes import check_machine, Machine
from support.setup import batch_shapes, optimizer_of

from eqformer import parallel, planning, training
from eqformer.parallel import CONTEXT, TENSOR
from eqformer.planning import gigabytes
from eqformer.program import read_compiled


@dataclasses.dataclass(frozen=True)
class Command:
    """Report what a plan holds and sends, before anything runs: give the flags of pretrain.py.

    Prints the sharding of each parameter, the bytes that a device holds and sends, and a pipeline's timeline. It needs
    no devices, so a mesh of any size can be examined on any machine.
    """

    recipe: str
    """The recipe to start from, or a preset of eqformer.models: --recipe llama-3-8b."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()
    compile: bool = False
    """Compile the step for simulated devices too, and count what the program holds and sends."""
    memory: str | None = None
    """A device's memory, such as 80GB: report whether the plan fits and, if not, which plans of as many devices do."""
    picture: Path | None = None
    """Draw the layout to this PNG; and a pipeline's timeline beside it, as NAME-timeline.png."""
    run_dir: Path | None = None
    """Accepted, since pretrain.py has it, and ignored."""
    trust_recipe: bool = False
    """Run the code of a recipe of one's own that lies in a run's folder, where a class of the recipe needs it."""


def report(command: Command) -> None:
    """Print the whole report."""
    check_machine(command.machine)
    recipe = command.run
    memory = None if command.memory is None else planning.bytes_of(command.memory)
    model = check(recipe)
    plan = abstract_plan(recipe)
    check_plan(recipe, plan, model)
    states = state_of(recipe, plan, optimizer_of(recipe, model), model)
    print(parallel.summary(plan, model, rows=recipe.batch, seq=recipe.seq), end="\n\n")
    held = plan.shapes(model)
    print(parallel.layout_table(held, plan.parameter_specs(held), plan.mesh).partition("\n")[2], end="\n\n")
    _print_whole(plan, held)
    held_bytes = _print_bytes(recipe, states, model)
    if memory is not None:
        _print_fitting(recipe, memory, held_bytes, states, model)
    _print_sent(recipe, plan, model, states.optimizer.trained)
    if plan.is_pipelined:
        print(f"timeline, a backward as long as two forwards\n{parallel.draw_timeline(plan.timetable())}\n")
    if command.compile:
        _print_compiled(recipe, model)
    if command.picture is not None:
        _draw(command.picture, recipe, model)


def _print_whole(plan: parallel.Plan, model: Any) -> None:
    if plan.size(TENSOR) > 1 and (layers := parallel.replicated_layers(model)):
        paths = ", ".join(path for path, _ in layers)
        print(f"computed whole by every device of {TENSOR}, as they name nothing to split: {paths}\n")


def _print_bytes(recipe: Recipe, states: training.PlannedState, model: Any) -> int:
    """Print what a device holds, and return its sum."""
    plan, most = states.plan, planning.step_bytes(states, model, batch_shapes(recipe))
    print(planning.held_table(planning.state_bytes(states), most))
    pieces = math.prod(plan.size(axis) for axis in parallel.BATCH_AXES) * plan.microbatches
    tokens = f"{recipe.batch // pieces} rows of {recipe.seq // plan.size(CONTEXT)} tokens"
    print(f"a microbatch on a device is {tokens}\n")
    return most.total


def _print_fitting(recipe: Recipe, memory: int, held: int, states: training.PlannedState, model: Any) -> None:
    """Print whether a plan that holds so much fits and, if not, up to three plans for as many devices that do."""
    of = f"{gigabytes(held)} of {gigabytes(memory)} a device, before what the compiler needs to work in"
    print(f"{'fits' if held <= memory else 'does not fit'}: {of}")
    if held > memory:
        with looking() as progress:
            found = planning.fitting_plans(states, model, batch_shapes(recipe), memory, progress=progress)
        print(planning.offers(found, functools.partial(choices, recipe)))
    print()


def _print_sent(recipe: Recipe, plan: parallel.Plan, model: Any, trained: training.Trained) -> None:
    sent = planning.sent_bytes(plan, model, rows=recipe.batch, seq=recipe.seq, trained=trained)
    print(planning.sent_table(sent), end="\n\n")
    if sent and recipe.optimizer.name == "muon":
        print("Muon's products of whole matrices send more, as XLA parts them: --compile counts all\n")


def _print_compiled(recipe: Recipe, model: Any) -> None:
    """Print the memory and the communication of the compiled step; devices are simulated, so it is a CPU's program."""
    plan = plan_of(recipe, jax.devices())
    program = read_compiled(compiled_step(recipe, plan, model), plan.mesh)
    held, more = program.argument, program.temporary
    print(f"compiled: {held:,} bytes of state and batch, {more:,} bytes of temporaries a device")
    print(planning.communication_table(program.transfers, names=parallel.COLLECTIVES), end="\n\n")


def compiled_step(recipe: Recipe, plan: parallel.Plan, model: Any, **options: Any) -> Any:
    """The recipe's step, compiled from shapes, with XLA's `options`."""
    optimizer = optimizer_of(recipe, model)
    states = state_of(recipe, plan, optimizer, model)
    lowered = planning.lowered_step(states, step_of(recipe, plan, optimizer), batch_shapes(recipe))
    return lowered.compile(compiler_options=options)


def _draw(path: Path, recipe: Recipe, model: Any) -> None:
    plan = plan_of(recipe, jax.devices())
    assert isinstance(plan.mesh, Mesh)
    model = plan.shapes(model)
    parallel.plot_layout(model, plan.parameter_specs(model), plan.mesh, path)
    print(f"drawn: {path}")
    if plan.is_pipelined:
        timeline = path.with_name(f"{path.stem}-timeline.png")
        parallel.plot_timeline(plan.timetable(), timeline)
        print(f"drawn: {timeline}")


main = entry(Command, report, left_out=("the run",))  # whose flags change nothing in the report

if __name__ == "__main__":
    main(sys.argv[1:])
