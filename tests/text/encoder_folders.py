"""Tiny folders of text encoders as sentence-transformers writes them, rebuilt from files of `make_encoders.py`."""

import json
import sys
from pathlib import Path

from safetensors.numpy import save_file


FIXTURES = Path(__file__).parents[1] / "fixtures"
sys.path.append(str(FIXTURES.parent / "models"))

from family_weights import weight


RECORDED = json.loads(file.read_text()) if (file := FIXTURES / "encoders.json").exists() else {}
CLASSIFIERS = json.loads(file.read_text()) if (file := FIXTURES / "classifiers.json").exists() else {}
TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "the quick brown fox jumps over the lazy dog and the cat and the dog",
    "query: where is the fox",
    "Cats and DOGS",
    "mat",
]
PAIRS = [
    ("where is the fox", "the fox jumps over the dog"),
    ("a dog", "the cat"),
    ("the mat", "mat"),
    ("fox", "a " * 40),
]


def write_encoder(folder: Path, name: str, seed: str = "") -> None:
    """Write the folder of a recorded case; another `seed` gives other weights."""
    case = RECORDED[name] if name in RECORDED else CLASSIFIERS[name]
    for file, content in case["files"].items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(content))
    for part, shapes in case["shapes"].items():
        arrays = {key: weight(f"{seed}{part}{key}", shape) for key, shape in shapes.items()}
        save_file(arrays, folder / part / "model.safetensors", metadata={"format": "pt"})
