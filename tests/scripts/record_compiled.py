"""Record the compiled programs' memory and traffic in compiled.json.

`python tests/scripts/record_compiled.py [NAME ...]` compiles the named training steps of that file (by default all) as
plan.py does. A step stays as recorded if the compiler for its accelerator is not installed. Programs in plan.py's cache
are not compiled again. Then the script prints the table of docs/accelerators-planning.md.
"""

import json
import pathlib
import sys


HERE = pathlib.Path(__file__).parent
RECORD = HERE / "compiled.json"

if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1] / "scripts")]
    from support import environment

    environment.prepare(["--simulate", "1"], compilers=True)

import plan
from support.command import parse

from eqformer import planning
from eqformer.recipes import plan_training_step
from eqformer.recipes._setup import make_abstract_plan, make_optimizer, make_train_state, model_shapes


def compiled(row: dict) -> dict:
    """Return the row with its compiled program's bytes held, allocated and sent, if the compiler is installed."""
    topology, recipe = planning.topology(row["topology"]), parse(plan.Command, row["flags"].split()).run
    if planning.missing_compiler(topology) is not None:
        return row
    compilation = plan.compile_for(plan_training_step(recipe, model_shapes(recipe), topology).lower, recipe, topology)
    program = compilation.program
    assert program is not None and not program.unread, compilation
    sent = planning.counted_bytes(make_abstract_plan(recipe), program.transfers)
    allocated = program.argument + program.temporary
    return row | {"held": program.held, "allocated": allocated, "sent": sum(sent.values())}


def formulas(row: dict) -> planning.Forecast:
    """Return the forecast of the row's step by formulas."""
    recipe = parse(plan.Command, row["flags"].split()).run
    model = model_shapes(recipe)
    states = make_train_state(recipe, make_abstract_plan(recipe), make_optimizer(recipe, model), model)
    return planning.forecast(states, model, recipe.batch_shapes(), planning.topology(row["topology"]))


def told(row: dict) -> str:
    """Return the row as it stands in the table of the docs."""
    words = row["flags"].split()
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    sizes = [(axis.removeprefix("mesh."), size) for axis, size in flags.items() if axis.startswith("mesh.")]
    choices = [
        " x ".join(f"{axis} {size}" for axis, size in sizes),
        f"remat {flags.get('execution.remat', 'products')}",
    ]
    choices += [f"zero {flags['zero']}"] if flags.get("zero", "3") != "3" else []
    choices += ["LoRA"] * ("lora.rank" in flags) + [value for name, value in flags.items() if name == "residual"]
    step = f"{flags['recipe']}, {flags['model.layers']} layers, {flags['batch']} x {flags['seq']}; {', '.join(choices)}"
    forecast = formulas(row)
    sent = sum(size for *_, size in forecast.sent)
    estimate = forecast.total - forecast.held[planning.MARGIN]
    errors = [f"{size / row['held'] - 1:+.1%}" for size in (estimate, forecast.total)]
    figures = [f"{row['held'] / 1e9:.2f}", *errors]
    figures += [f"{row['sent'] / 1e9:.2f}", f"{sent / row['sent'] - 1:+.1%}"]
    return f"| {step} | {row['topology']} | {' | '.join(figures).replace('%', ' %')} |"


def main(names: list[str]) -> None:
    """Compile and record the named steps, and print their rows of the table."""
    rows = json.loads(RECORD.read_text())
    for number, row in enumerate(rows):
        if not names or row["name"] in names:
            rows[number] = compiled(row)
            RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(told(row) for row in rows if not names or row["name"] in names))


if __name__ == "__main__":
    main(sys.argv[1:])
