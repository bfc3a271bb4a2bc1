"""Run the cells of a tutorial and store their outputs: `python docs/tutorials/execute.py NOTEBOOK --set MODEL=PATH`.

The notebook is a Jupyter notebook whose cells only print text and show figures of matplotlib, so no Jupyter kernel is
needed. `--set NAME=TEXT` replaces a variable of the cell that is tagged `parameters`, as papermill does.
"""

import argparse
import base64
import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


Cell = dict[str, Any]
Output = dict[str, Any]


def read_notebook(path: Path) -> dict[str, Any]:
    """Return a notebook as JSON has it: `cells`, `metadata`, and the version of the format."""
    return json.loads(path.read_text(encoding="utf-8"))


def has_tag(cell: Cell, tag: str) -> bool:
    """Return whether a cell has a tag.

    The tags are `parameters`, `varies` if the output differs between machines, and `trained` if its numbers differ by
    the rounding of many training steps.
    """
    return tag in cell["metadata"].get("tags", ())


def code_cells(notebook: Mapping[str, Any]) -> list[Cell]:
    """Return the code cells of a notebook, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(outputs: list[Output]) -> str:
    """Return the printed text of a cell's outputs."""
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def run_notebook(notebook: Mapping[str, Any], parameters: Mapping[str, object]) -> Iterator[tuple[Cell, list[Output]]]:
    """Run the code cells in one namespace, and yield each cell with its new outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(notebook):
        outputs = run_cell("".join(cell["source"]), namespace)
        if has_tag(cell, "parameters"):
            namespace.update(parameters)
        yield cell, outputs


def run_cell(source: str, namespace: dict[str, Any]) -> list[Output]:
    """Run a cell's code, and return what it prints and the figures that it shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    images: list[Output] = []
    show, plt.show = plt.show, lambda: images.extend(take_figures())
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "<cell>", "exec"), namespace)
    finally:
        plt.show = show
        plt.close("all")
    lines = printed.getvalue().splitlines(keepends=True)
    return ([{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []) + images


def take_figures() -> Iterator[Output]:
    """Yield the open figures as PNG images."""
    from matplotlib import pyplot as plt

    for number in plt.get_fignums():
        content = io.BytesIO()
        plt.figure(number).savefig(content, format="png", dpi=100)
        image = base64.b64encode(content.getvalue()).decode()
        yield {"data": {"image/png": image}, "metadata": {}, "output_type": "display_data"}
    plt.close("all")


def main() -> None:
    """Run a notebook, and write it back with its outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=TEXT", help="replace a parameter")
    arguments = parser.parse_args()
    notebook = read_notebook(arguments.notebook)
    parameters = {name: value for name, _, value in (setting.partition("=") for setting in arguments.set)}
    for number, (cell, outputs) in enumerate(run_notebook(notebook, parameters), 1):
        cell.update(execution_count=number, outputs=outputs)
        print(text_of(outputs), end="", flush=True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    arguments.notebook.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
