"""Every room can be imported with the core packages alone, and has its public names."""

import importlib
import pathlib
import subprocess
import sys

import pytest

import eqformer


PACKAGE = pathlib.Path(eqformer.__file__).parent
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
EXTRAS = (
    "orbax grain tokenizers safetensors tyro rich matplotlib pyarrow datasets tensorboardX wandb torch transformers "
    "starlette uvicorn llguidance gguf"
)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_its_names(room):
    module = importlib.import_module(f"eqformer.{room}")
    assert len([name for name in vars(module) if not name.startswith("_")]) > 3


def test_rooms_come_when_they_are_used_and_the_core_packages_suffice_for_all():
    block = f"import sys\nfor extra in {EXTRAS.split()}:\n    sys.modules[extra] = None\n"
    imports = "\n".join(f"import eqformer.{room}" for room in ROOMS) + "\neqformer.data.standard_library()"
    missing = """
try:
    eqformer.training.Checkpointer('/nowhere').save({}, 1, {})
except ImportError as error:
    print(error)
eqformer.optimizers
"""
    code = """
import eqformer
before = set(sys.modules)
assert not any(f"eqformer.{room}" in before for room in dir(eqformer) if not room.startswith("_"))
print(eqformer.models.preset("llama-byte-1m").layers, [room for room in dir(eqformer) if room == "training"])
assert "eqformer.models" in sys.modules and "eqformer.training" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", block + code + imports + missing], capture_output=True, text=True)
    lazy, error = done.stdout.splitlines()
    assert lazy == "4 ['training']" and "Checkpointer(directory) needs the package orbax" in error, done.stderr
    assert "eqformer[train]" in error
    assert "AttributeError: module 'eqformer' has no attribute 'optimizers'" in done.stderr
