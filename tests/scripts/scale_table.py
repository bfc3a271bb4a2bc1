"""Print the columns that formulas compute in the table of large recipes in docs/accelerators-planning.md.

Run `python tests/scripts/scale_table.py`.
"""

import pathlib
import sys


ROOT = pathlib.Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "scripts")]
    from support import environment

    environment.prepare(["--simulate", "1"])

from eqformer import planning
from eqformer.recipes import LARGE
from eqformer.recipes._setup import make_abstract_plan, make_optimizer, make_train_state, model_shapes


PAGE = ROOT / "docs" / "accelerators-planning.md"


def formulas(name: str) -> str:
    """Return a recipe's cells of the table: topology, GB held and GB sent by a device, seconds of a step, MFU."""
    topology, recipe = LARGE[name]
    plan, model = make_abstract_plan(recipe), model_shapes(recipe)
    states = make_train_state(recipe, plan, make_optimizer(recipe, model), model)
    forecast = planning.forecast(states, model, recipe.batch_shapes(), planning.topology(topology))
    sent = sum(size for *_, size in forecast.sent)
    held, time = forecast.total / 1e9, forecast.time
    return f"{name} | {topology} | {held:.1f} | {sent / 1e9:.1f} | {time.seconds:.2f}, {time.utilization:.0%}"


def in_docs() -> dict[str, str]:
    """Return the same cells as they stand in the docs, by the recipe's name."""
    table = PAGE.read_text(encoding="utf-8").partition("| `--recipe` |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[0]: " | ".join(row[:5]) for row in rows}


if __name__ == "__main__":
    for name in LARGE:
        print(f"| {formulas(name)} |")
