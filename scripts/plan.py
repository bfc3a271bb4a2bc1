"""Report a run's memory, communication and time before it runs: `python scripts/plan.py --topology v5e:16x16`."""

import math
import sys
from collections.abc import Sequence

from support import environment
from support.flags import parse_words


def prepare(arguments: Sequence[str]) -> None:
    """Prepare JAX for a command line, with a single device, because nothing runs.

    `--compile` and `--picture` without a topology are exceptions: they need as many simulated devices as the mesh has.
    """
    flags = parse_words(arguments)
    sizes = [words[0] for flag, words in flags.items() if flag.startswith("--mesh.") and words]
    needs_mesh = flags.keys() & {"--compile", "--picture"} and "--topology" not in flags
    devices = math.prod(int(size) for size in sizes if size.isdecimal()) if needs_mesh else 1
    simulate = [] if environment.simulated_devices(flags) else ["--simulate", str(max(1, devices))]
    environment.prepare([*arguments, *simulate], compilers=True, gradients="--decode" not in flags)


if __name__ == "__main__":
    prepare(sys.argv)

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh
from support.command import entry
from support.processes import check_machine, Machine

from eqformer import delete_oldest, nn, parallel, planning, user_cache
from eqformer.planning import Compilation, gigabytes, missing_compiler, Topology
from eqformer.program import CompiledCosts, read_compiled
from eqformer.recipes import (
    check,
    LARGE,
    lower_training_step,
    plan_decode_step,
    plan_training_step,
    Recipe,
    Screen,
    setup,
)


@dataclasses.dataclass(frozen=True)
class Command:
    """Report memory, communication and time of a run, before anything runs: give the flags of pretrain.py.

    The report has the sharding of each parameter, the bytes that a device holds and sends (computed by formulas), and a
    pipeline's timeline. With --topology it also has the time of a step, and the kernels that will run. If the compiler
    of these accelerators is installed, the recipe's step is compiled, and the report also has the figures of the
    compiled step. Nothing runs, so a mesh of any size can be examined on any machine.
    """

    recipe: str
    """A recipe, or a preset of eqformer.models; such as --recipe llama-3-8b."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()
    depth: int | None = None
    """The depth of the recipe speedrun."""
    topology: str | None = None
    """Accelerators, such as v5e:16x16 or h100:8; TPU sizes multiply to chips, and h100:8x4 is 4 machines of 8 GPUs."""
    memory: str | None = None
    """Memory of a device, such as 80GB; without --topology, says whether the plan fits or which other plans do."""
    decode: bool = False
    """Plan a decode step, not training; it decodes one token of each of --batch rows, with caches of --seq tokens."""
    cache_dtype: str | None = None
    """Dtype of the caches of --decode; such as bfloat16, int8 or fp8; by default the compute dtype."""
    search: bool = False
    """Rank all meshes by the time of a step; first by formulas from shapes, then by traced and compiled plans."""
    formulas: bool = False
    """Compile nothing."""
    compile: bool = False
    """Compile for simulated devices; only without --topology, which uses the accelerators' compiler if installed."""
    json: bool = False
    """Print JSON."""
    picture: Path | None = None
    """Draw to this PNG; memory and time by cause or, without --topology, the layout (and NAME-timeline.png)."""
    run_dir: Path | None = None
    """Ignored; this flag exists only because pretrain.py has it."""
    trust_recipe: bool = False
    """Run the Python file recipe.py of a run's folder if the recipe needs a class that this file defines."""


SEARCH_LIMIT = 5  # The maximum number of meshes that a search lists.
COMPILED_AT_ONCE = 2  # The number of meshes that a search compiles; if none of them fits, it compiles further meshes.
KEPT_BYTES = 2**26  # The maximum number of bytes of stored figures of compiled programs.


def print_report(command: Command) -> None:
    """Print the report, or the ranking of a search."""
    check_machine(command.machine)
    _check_flags(command)
    recipe, target = command.run, target_of(command)
    model = check(recipe, trains=not command.decode)
    if command.search:
        assert isinstance(target, Topology)
        search(command, model, target)
        return
    if command.decode:
        assert isinstance(target, Topology)
        step = plan_decode_step(recipe, model, target, cache_dtype=command.cache_dtype)
    else:
        step = plan_training_step(recipe, model, target)
    if not command.json:
        print(step.report(), end="\n\n", flush=True)
    compilation = program = None
    if isinstance(target, Topology):
        if not command.formulas and not missing_compiler(target):
            compilation = compile_for(step.lower, recipe, target)
    elif command.compile:  # The devices are simulated, so the program is a CPU's.
        plan = setup.make_plan(recipe, jax.devices())
        program = read_compiled(step.lower(plan).compile(), plan.mesh)
    if command.json:
        row = {"recipe": command.recipe, "flags": setup.plan_flags(recipe)} | step.forecast.as_dict()
        compiled = compilation or program
        print(json.dumps(row | {"compiled": compiled and compiled.as_dict()}, indent=1))
    else:
        _print_compiled(target, step.forecast, compilation, program)
        memory = step.forecast.memory
        if compilation is None or memory is None:
            fits = step.forecast.missing == 0
        else:
            fits = compilation.fits(memory)
        if not fits:
            with show_search() as progress:
                alternatives = step.find_alternatives(progress)
            print(alternatives)
    if command.picture is not None:
        _draw(command.picture, recipe, model, step.forecast)


def _check_flags(command: Command) -> None:
    """Raise a `ValueError` for combinations of flags in which a flag would be ignored."""
    if command.cache_dtype is not None and not command.decode:
        raise ValueError(
            f"--cache-dtype {command.cache_dtype}: training has no caches; leave --cache-dtype out, or give --decode."
        )
    for flag, value in (("--picture", command.picture), ("--decode", command.decode or None)):
        if command.search and value is not None:
            words = f"{flag} {value}" if flag == "--picture" else flag
            raise ValueError(
                f"--search {words}: a search ranks meshes for training, as text or JSON; leave --search out, and give "
                "the flags of one mesh."
            )
    if command.topology is not None and command.memory is not None:
        raise ValueError(
            f"--topology {command.topology} --memory {command.memory}: the topology decides a device's memory; leave "
            "one of the two flags out."
        )
    if command.topology is not None and command.compile:
        raise ValueError(
            f"--topology {command.topology} --compile: a step is always compiled for the topology if its compiler is "
            "installed; leave out --compile, or leave out --topology to compile for simulated devices."
        )


def target_of(command: Command) -> planning.Target:
    """Return the topology of --topology or of the recipe; without a topology, a device with the memory of --memory."""
    if command.topology is not None:
        return planning.topology(command.topology)
    if command.recipe in LARGE and command.memory is None and not command.compile:
        return planning.topology(LARGE[command.recipe][0])
    if command.search or command.decode:
        raise ValueError("--topology is missing: say which accelerators to plan for, such as --topology v5e:16x16.")
    return planning.DeviceMemory(None if command.memory is None else planning.parse_bytes(command.memory))


def compile_for(
    lower: Callable[[parallel.Plan], jax.stages.Lowered], recipe: Recipe, topology: Topology, number: str = ""
) -> Compilation:
    """Compile a step for a topology's devices, and store its figures for later calls."""
    plan, folder = setup.make_plan(recipe, planning.devices_of(topology)), user_cache("plans")
    assert isinstance(plan.mesh, Mesh)
    with Screen(errors=True).working(f"compiling{number} for {topology}; a compiler takes 5 s to some minutes"):
        compilation = planning.compilation_of(lower(plan), topology, plan.mesh, folder)
    if folder is not None:
        delete_oldest(folder, KEPT_BYTES)
    return compilation


def _print_compiled(
    target: planning.Target,
    forecast: planning.Forecast,
    compilation: Compilation | None,
    program: CompiledCosts | None,
) -> None:
    """Print the costs of the compiled step, or the reason why nothing is compiled."""
    if compilation is not None:
        print(planning.compilation_table(compilation, forecast), flush=True)
    elif isinstance(target, Topology):
        print(_why_not_compiled(target), flush=True)
    if program is not None:
        state, temporary = program.argument, program.temporary
        print(f"compiled: {state:,} bytes of state and batch, {temporary:,} bytes of temporaries a device")
        print(planning.communication_table(program.transfers, names=parallel.COLLECTIVES), end="\n\n")


def _why_not_compiled(topology: Topology) -> str:
    return missing_compiler(topology) or "nothing is compiled, as --formulas says"


def _draw(path: Path, recipe: Recipe, model: nn.LanguageModel, forecast: planning.Forecast) -> None:
    """Draw the costs of a step on a topology; without a topology, the layout and a pipeline's timeline."""
    if forecast.roofline is not None and forecast.memory is not None:
        planning.plot_costs(forecast.held, forecast.memory, forecast.time.by_cause, path)
        return
    plan = setup.make_plan(recipe, jax.devices())
    assert isinstance(plan.mesh, Mesh)
    model = plan.shapes(model)
    parallel.plot_layout(model, plan.parameter_specs(model), plan.mesh, path)
    print(f"drawn: {path}", file=sys.stderr)
    if plan.is_pipelined:
        timeline = path.with_name(f"{path.stem}-timeline.png")
        parallel.plot_timeline(plan.timetable(), timeline)
        print(f"drawn: {timeline}", file=sys.stderr)


@contextmanager
def show_search() -> Iterator[planning.Progress]:
    """Show on standard error that plans are searched, and the progress of the search."""
    screen = Screen(errors=True)
    screen.note("looking for plans that fit; tracing each takes seconds")
    with screen.counting() as show:
        yield show


def search(command: Command, model: nn.LanguageModel, topology: Topology) -> None:
    """Print the fastest meshes that fit, three times: ranked from shapes alone, by formulas, and as compiled."""
    recipe, format_plan = command.run, functools.partial(setup.candidate_flags, command.run)
    memory, batch = topology.accelerator.memory, recipe.batch_shapes()
    states = setup.make_train_state(
        recipe, setup.make_abstract_plan(recipe), setup.make_optimizer(recipe, model), model
    )
    note = (lambda text: None) if command.json else functools.partial(print, flush=True)

    def show_ranking(ranking: planning.ShapeRanking) -> None:
        so_far = f", {ranking.compared} of {ranking.meshes} meshes so far" if ranking.compared < ranking.meshes else ""
        not_compiled = [None] * len(ranking.proposals)
        table = planning.ranking_table(ranking.proposals, not_compiled, format_plan, memory)
        note(f"{topology}, {topology.devices} devices, ranked by shapes alone{so_far}\n{table}\n")

    with show_search() as progress:
        result = planning.search_plans(
            states,
            model,
            batch,
            topology,
            limit=SEARCH_LIMIT,
            noisy_copies=recipe.has_noisy_copies,
            progress=progress,
            show_ranking=show_ranking,
        )
    if not result.proposals:
        raise ValueError(
            f"--search --topology {topology}: no mesh fits into {gigabytes(memory)} a device; take more "
            "devices, more --microbatches, a smaller --batch or --seq, or a smaller model."
        )
    proposals = result.proposals
    compilations: list[Compilation | None] = [None] * len(proposals)
    note(f"ranked by formulas\n{planning.ranking_table(proposals, compilations, format_plan, memory)}\n")
    if not command.formulas and missing_compiler(topology) is None:
        for number, proposal in enumerate(proposals):
            if number >= COMPILED_AT_ONCE and any(done is not None and done.fits(memory) for done in compilations):
                break
            variant, model = setup.with_candidate(recipe, proposal.candidate), proposal.candidate.model
            states = setup.make_train_state(
                variant, proposal.candidate.plan, setup.make_optimizer(variant, model), model
            )
            lower = functools.partial(lower_training_step, variant, states)
            compilations[number] = compile_for(lower, variant, topology, f" plan {number + 1}")
            table = planning.ranking_table(proposals, compilations, format_plan, memory)
            note(f"{number + 1} compiled\n{table}\n")
    if command.json:
        rows = [{"flags": format_plan(proposal.candidate)} | proposal.as_dict() for proposal in proposals]
        pairs = zip(rows, compilations)
        print(json.dumps([row | {"compiled": done and done.as_dict()} for row, done in pairs], indent=1))
    elif compilations[0] is None:
        print(_why_not_compiled(topology))


main = entry(Command, print_report, hidden=("the run",))  # the run's flags change nothing in the report

if __name__ == "__main__":
    main(sys.argv[1:])
