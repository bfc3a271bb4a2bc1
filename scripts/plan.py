"""What a run will be on accelerators that are not here: `python scripts/plan.py --recipe NAME --topology v5e:16x16`."""

import sys

from support import environment


if __name__ == "__main__":
    # Nothing runs, so JAX needs no accelerator of its own.
    is_training = "--decode" not in sys.argv
    environment.prepare([*sys.argv, "--simulate", "1"], compilers=True, gradients=is_training)

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import tyro
from jax.sharding import Mesh
from recipes import LARGE, Mesh as RecipeMesh, Recipe
from support.check import check
from support.command import entry
from support.kernel_report import decode_lines, kernel_lines
from support.mesh import abstract_plan, check_plan, choices, flags, in_flags, plan_of, recipe_under, state_of, step_of
from support.multiplying import products_line
from support.nearest import looking, nearest
from support.screen import Screen
from support.setup import batch_shapes, optimizer_of
from support.user_folder import delete_oldest, user_folder

from eqformer import generation, models, nn, parallel, planning
from eqformer.planning import Compilation, gigabytes, missing_compiler
from eqformer.training import PlannedState


@dataclasses.dataclass(frozen=True)
class Command:
    """Tell what a run will hold, send and take on accelerators that are not here: give the flags of pretrain.py.

    First by formulas from shapes; then, where the accelerators' compiler is installed, by the recipe's real step as it
    compiles for them. Nothing runs, so a pod can be examined on any machine.
    """

    recipe: str
    """The recipe to start from, or a preset of eqformer.models: --recipe llama-3-8b."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    topology: str | None = None
    """Accelerators such as v5e:16x16 or tpu7x:4x4x4; or GPUs, as those of a machine x machines, h100:8x4."""
    decode: bool = False
    """Tell of decoding one token of --batch rows with caches of --seq tokens, not of training."""
    cache_dtype: str | None = None
    """What caches of --decode are kept in; such as bfloat16, int8 or fp8, and the compute dtype by default."""
    weights: Literal["decoded", "kept"] = "decoded"
    """Whether --decode counts weights that --model FOLDER holds in fewer bits as decoded, or kept so."""
    search: bool = False
    """Rank meshes over all devices by the time of a step: at once by formulas, then by traced and compiled plans."""
    formulas: bool = False
    """Compile nothing."""
    json: bool = False
    """Print JSON."""
    picture: Path | None = None
    """Draw memory by cause and time by cause to this PNG."""
    run_dir: Path | None = None
    """Accepted, since pretrain.py has it, and ignored."""
    trust_recipe: bool = False
    """Run the code of a recipe of one's own that lies in a run's folder, where a class of the recipe needs it."""


OFFERED, COMPILED = 5, 2  # the most meshes that a search lists, and that it compiles unless none of these fits
KEPT = 2**26  # the bytes of what is kept of compiled programs


def tell(command: Command) -> None:
    """Print what is asked for."""
    _check_flags(command)
    recipe, topology = command.run, _topology(command)
    model = check(recipe, trains=not command.decode)
    if command.search:
        states = state_of(recipe, abstract_plan(recipe), optimizer_of(recipe, model), model)
        search(command, states, model, topology)
        return
    plan = planning.for_platform(abstract_plan(recipe), topology.accelerator.platform)
    in_flags(recipe, lambda: topology.speeds(plan.mesh), f"--topology {topology}")
    run = decoding(command, model, topology) if command.decode else training(recipe, model, topology)
    if not command.json:
        print(_by_formulas(command, model, topology, plan, run.found), end="\n\n", flush=True)
    made = None if command.formulas or missing_compiler(topology) else compiled(run, recipe, topology)
    if command.json:
        row = {"recipe": command.recipe, "flags": flags(recipe)} | run.found.as_dict()
        print(json.dumps(row | {"compiled": made and made.as_dict()}, indent=1))
    else:
        print(_unsaid(topology) if made is None else planning.compilation_table(made, run.found), flush=True)
        if run.found.missing if made is None else not made.fits(topology.accelerator.memory):
            with looking() as progress:
                others = run.instead(progress)
            print(others)
    if command.picture is not None:
        planning.plot_costs(run.found.held, topology.accelerator.memory, run.found.time.by_cause, command.picture)


def _by_formulas(
    command: Command, model: nn.Transformer, topology: planning.Topology, plan: parallel.Plan, found: planning.Forecast
) -> str:
    """Format what runs where, and what formulas say of a step."""
    recipe, accelerator = command.run, topology.accelerator
    if command.decode:
        lines = decode_lines(recipe, model, accelerator.platform, command.cache_dtype)
    else:
        lines = [*kernel_lines(recipe, model, accelerator.platform), products_line(recipe, model, accelerator.name)]
    ways = "\n".join(filter(None, lines))
    summary = parallel.summary(plan, model, rows=recipe.batch, seq=1 if command.decode else recipe.seq)
    table = planning.forecast_table(found)
    return f"{topology}; {summary}; {found.parameters:,} parameters\n{ways}\n\nby formulas:\n{table}"


def _check_flags(command: Command) -> None:
    """Raise a `ValueError` for flags of which one would be ignored."""
    if command.cache_dtype is not None and not command.decode:
        raise ValueError(
            f"--cache-dtype {command.cache_dtype}: training has no caches; leave it out, or give --decode."
        )
    if command.weights == "kept" and not (command.decode and command.run.published):
        raise ValueError(
            "--weights kept: it is a published folder's weights that are decoded from or kept in fewer bits, to write "
            "text; give --model FOLDER --decode, or leave it out."
        )
    for flag, value in (("--picture", command.picture), ("--decode", command.decode or None)):
        if command.search and value is not None:
            given = f"{flag} {value}" if flag == "--picture" else flag
            raise ValueError(
                f"--search {given}: a search ranks meshes of training as text or JSON; leave --search out and give the "
                "mesh that is meant."
            )


def _topology(command: Command) -> planning.Topology:
    """The accelerators that are asked for, or those that the recipe was written for."""
    if command.topology is None and command.recipe not in LARGE:
        raise ValueError("--topology is missing: say which accelerators to plan for, such as --topology v5e:16x16.")
    return planning.topology(command.topology or LARGE[command.recipe][0])


@dataclasses.dataclass(frozen=True)
class Run:
    """What is reported: its formulas, how it is lowered under a plan, and the plans that would do in its place."""

    found: planning.Forecast
    lower: Callable[[parallel.Plan], jax.stages.Lowered]
    instead: Callable[[planning.Progress], str]


def training(recipe: Recipe, model: nn.Transformer, topology: planning.Topology) -> Run:
    """A training step."""
    plan, optimizer, batch = abstract_plan(recipe), optimizer_of(recipe, model), batch_shapes(recipe)
    check_plan(recipe, plan, model)
    states = state_of(recipe, plan, optimizer, model)

    def lower(plan: parallel.Plan) -> jax.stages.Lowered:
        return planning.lowered_step(states.with_plan(plan), step_of(recipe, plan, optimizer), batch)

    def instead(progress: planning.Progress) -> str:
        others = planning.best_plans(states, model, batch, topology, progress=progress)
        one = topology.accelerator
        near = nearest(recipe, one.memory, one.platform, 3 - len(others))
        lines = [planning.proposals(others, functools.partial(choices, recipe)), *["on the same mesh by"] * bool(near)]
        return "\n".join([*lines, *map(str, near)])

    return Run(planning.forecast(states, model, batch, topology), lower, instead)


def decoding(command: Command, model: nn.Transformer, topology: planning.Topology) -> Run:
    """A step that writes a token of each row, with parameters in the dtype that they are computed in."""
    recipe = command.run
    compute = recipe.precision.compute
    if command.weights == "kept":
        assert recipe.published is not None
        whole = models.load_shapes(recipe.published, dtype=compute, weights=command.weights)
    else:
        whole = eqx.filter_eval_shape(nn.Precision(compute, compute).apply, model)
    model = whole
    if recipe.mesh.pipe == 1:
        chip = topology.accelerator
        split = recipe.mesh.tensor * recipe.mesh.fsdp
        model = eqx.filter_eval_shape(generation.unstack_for_platform, model, chip.platform, chip.name, split)
    sizes: dict[str, Any] = {"rows": recipe.batch, "capacity": recipe.seq, "cache_dtype": command.cache_dtype}
    found = planning.decode_forecast(abstract_plan(recipe), model, topology, **sizes)

    def spelled(one: planning.Served) -> str:
        mesh = dataclasses.replace(recipe, mesh=RecipeMesh(**parallel.axis_sizes(one.plan.mesh)))
        words = [flags(mesh), f"--batch {one.rows}" * (one.rows != recipe.batch)]
        words.append(f"--cache-dtype {one.cache_dtype}" if one.cache_dtype else "")
        return " ".join(filter(None, words)) or "one device"

    others = functools.partial(planning.best_decodes, abstract_plan(recipe), whole, topology, **sizes)
    instead = lambda progress: planning.servings(others(progress=progress), spelled)
    return Run(found, lambda plan: planning.lowered_decode(plan, model, **sizes), instead)


def compiled(run: Run, recipe: Recipe, topology: planning.Topology, which: str = "") -> Compilation:
    """Compile a run's program for a topology's devices; what is known of it is kept for the user's next look."""
    plan, folder = plan_of(recipe, planning.devices_of(topology)), user_folder("plans")
    assert isinstance(plan.mesh, Mesh)
    with Screen(errors=True).working(f"compiling{which} for {topology}; a compiler takes 5 s to some minutes"):
        made = planning.compilation_of(run.lower(plan), topology, plan.mesh, folder)
    if folder is not None:
        delete_oldest(folder, KEPT)
    return made


def search(command: Command, states: PlannedState, model: nn.Transformer, topology: planning.Topology) -> None:
    """Print the meshes that fit and take the least time: by shapes at once, by formulas, and as compilers answer."""
    recipe, spelled = command.run, functools.partial(choices, command.run)
    memory = topology.accelerator.memory
    note = (lambda text: None) if command.json else functools.partial(print, flush=True)

    def first(look: planning.FirstLook) -> None:
        so_far = f", {look.compared} of {look.meshes} meshes so far" if look.compared < look.meshes else ""
        nothing = [None] * len(look.proposals)
        table = planning.ranking_table(look.proposals, nothing, spelled, memory)
        note(f"{topology}, {topology.devices} devices, ranked by shapes alone{so_far}\n{table}\n")

    with looking() as progress:
        shapes = batch_shapes(recipe)
        offered = planning.best_plans(states, model, shapes, topology, most=OFFERED, progress=progress, first=first)
    if not offered:
        raise ValueError(
            f"--search --topology {topology}: no mesh was found that fits into {gigabytes(memory)} a device; take more "
            "devices, more --microbatches, a smaller --batch or --seq, or a smaller model."
        )
    made: list[Compilation | None] = [None] * len(offered)
    note(f"ranked by formulas\n{planning.ranking_table(offered, made, spelled, memory)}\n")
    if not command.formulas and missing_compiler(topology) is None:
        for number, one in enumerate(offered):
            if number >= COMPILED and any(its is not None and its.fits(memory) for its in made):
                break
            own = recipe_under(recipe, one.candidate)
            made[number] = compiled(training(own, one.candidate.model, topology), own, topology, f" plan {number + 1}")
            note(f"{number + 1} compiled\n{planning.ranking_table(offered, made, spelled, memory)}\n")
    if command.json:
        rows = [{"flags": spelled(one.candidate)} | one.as_dict() for one in offered]
        print(json.dumps([row | {"compiled": its and its.as_dict()} for row, its in zip(rows, made)], indent=1))
    elif made[0] is None:
        print(_unsaid(topology))


def _unsaid(topology: planning.Topology) -> str:
    return missing_compiler(topology) or "nothing is compiled, as --formulas says"


main = entry(Command, tell, left_out=("the run",))  # whose flags change nothing in the report

if __name__ == "__main__":
    main(sys.argv[1:])
