"""Conversions from a run to a published folder, to a new run over a mesh, and back, with the same text each time."""

import json
from pathlib import Path

import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import load_file
from script_helpers import learn_nothing, LLAMA, run_here as run, TINY, write_corpus

from eqformer import models


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small run, published."""
    folder = tmp_path_factory.mktemp("models")
    flags = [*TINY, *LLAMA, "--data", write_corpus(folder / "corpus")]
    flags += ["--sample-every", "0", "--validate-every", "100", "--simulate", "1"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        learn_nothing(monkeypatch)
        made = run("pretrain.py", "--run-dir", folder / "first", *flags)
    assert made.returncode == 0, made.stderr
    made = run("convert.py", folder / "first", folder / "published")
    assert made.returncode == 0 and "sample.py --model" in made.stdout, made.stderr
    return folder


def text(*flags, devices=1):
    devices = ["--simulate", devices]
    made = run("sample.py", *flags, "--prompt", "line 3", "--tokens", 24, "--temperature", 0, *devices)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.grid
def test_a_run_goes_out_and_comes_back(place):
    assert {path.name for path in (place / "published").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    written = text("--model", place / "published")
    made = run("convert.py", place / "published", place / "back")
    assert made.returncode == 0 and "--model" in made.stdout, made.stderr
    assert text("--run-dir", place / "back") == written
    # Asked in a chat template, it answers without what it was asked.
    (place / "back" / "published" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert text("--run-dir", place / "back") == written.removeprefix("line 3")


@pytest.mark.grid
def test_a_run_is_uploaded_with_its_card(place, monkeypatch):
    uploads = []
    monkeypatch.setattr(models, "push", lambda *arguments: uploads.append(arguments) or "an address")
    made = run("convert.py", place / "first", place / "uploaded", "--push", "me/mine", "--license", "mit")
    assert made.returncode == 0 and "uploaded   an address" in made.stdout, made.stderr
    ((folder, name, card),) = uploads
    assert (folder, name) == (place / "uploaded", "me/mine") and (folder / "config.json").exists()
    assert (card.license, card.base_model, card.datasets) == ("mit", None, (str(place / "corpus"),))
    assert json.loads(card.recipe)["recipe"]["steps"] == 6


@pytest.mark.grid
def test_a_run_over_a_mesh_writes_what_is_published(place):
    written = text("--model", place / "published")
    assert text("--run-dir", place / "first", "--mesh.tensor", 2, devices=2) == written


@pytest.mark.grid
def test_one_file_writes_in_its_own_tokens_and_chat_template():
    file = Path(__file__).parents[1] / "fixtures" / "qwen3moe.gguf"
    asked, continued = text("--model", file), text("--model", file, "--chat", "no")
    assert continued.startswith("line 3") and not asked.startswith("line 3") and len(asked) > 20


@pytest.mark.grid
def test_a_gguf_file_becomes_a_run_and_a_folder(tmp_path):
    file = Path(__file__).parents[1] / "fixtures" / "qwen3moe.gguf"
    for source, target in ((file, "run"), (tmp_path / "run", "folder")):
        done = run("convert.py", source, tmp_path / target)
        assert done.returncode == 0, done.stderr
    assert same_trees(models.load(tmp_path / "folder"), models.load(file))
    assert run("convert.py", __file__, tmp_path / "other").returncode == 2  # the control: another kind of file


@pytest.mark.grid
def test_what_was_brought_goes_on_over_a_mesh(place):
    """With other rows than a run of its own would have; what was published beside the weights stays."""
    assert run("convert.py", place / "published", place / "second").returncode == 0
    (place / "second" / "published" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    flags = "--steps 2 --seq 32 --batch 4 --sample-every 0 --simulate 4 --mesh.fsdp 2 --mesh.tensor 2 --zero 3".split()
    where = ["--model", place / "published", "--data", place / "corpus"]
    made = run("pretrain.py", *where, "--run-dir", place / "second", *flags)
    assert made.returncode == 0, made.stderr
    made = run("pretrain.py", *where, "--run-dir", place / "third", *flags)
    assert made.returncode == 0 and "published: a Llama" in made.stdout, made.stderr
    assert run("convert.py", place / "second", place / "again").returncode == 0
    assert run("convert.py", place / "third", place / "other").returncode == 0
    first, again, other = (load_file(place / name / "model.safetensors") for name in ("published", "again", "other"))
    assert all(np.array_equal(again[name], array) for name, array in other.items())  # brought first, or read at once
    moved = {name: np.max(np.abs(again[name] - array)) for name, array in first.items()}
    assert all(0 < distance < 1e-3 for distance in moved.values())  # from where it was, by two small steps
    assert (place / "again" / "chat_template.jinja").exists()
    config = json.loads((place / "again" / "config.json").read_text())
    assert config == json.loads((place / "published" / "config.json").read_text())


@pytest.mark.grid
def test_low_rank_changes_are_trained_alone(place):
    """Of a model that was brought: merged, what has no change stays bit by bit; alone, they are an adapter's."""
    assert run("convert.py", place / "published", place / "brought").returncode == 0
    flags = "--simulate 1 --steps 3 --seq 32 --batch 4 --sample-every 0 --lora.rank 2 --lora.maps query value".split()
    where = ["--model", place / "published", "--data", place / "corpus", "--run-dir", place / "brought"]
    made = run("pretrain.py", *where, *flags)
    assert made.returncode == 0, made.stderr
    assert run("convert.py", place / "brought", place / "merged").returncode == 0
    assert run("convert.py", place / "brought", place / "adapter", "--adapter").returncode == 0
    before, after = (load_file(place / name / "model.safetensors") for name in ("published", "merged"))
    changed = {name for name, array in before.items() if not np.array_equal(after[name], array)}
    assert changed == {name for name in before if "q_proj" in name or "v_proj" in name}
    factors = load_file(place / "adapter" / "adapter_model.safetensors")
    assert len(factors) == 2 * len(changed) and all(2 in array.shape for array in factors.values())


@pytest.mark.parametrize(
    "script,flags,words",
    [
        ("convert.py", "{first} {published}", "this path exists already"),
        ("convert.py", "{corpus} {new}", "nor a published model (config.json, or a GGUF file); give a run"),
        ("sample.py", "--model {published} --chat yes --simulate 3 --mesh.tensor 3", "take an axis that divides"),
        ("pretrain.py", "--model {published} --run-dir {new} --model.layers 3", "layers: 2 -> 3"),
        ("convert.py", "{first} {new} --adapter", "the model has no LoRA"),
        ("convert.py", "{published} {new} --push me/mine", "--push me/mine: only the model of a run is uploaded"),
    ],
)
def test_bad_input(place, script, flags, words):
    names = {name: place / name for name in ("first", "published", "corpus", "new")}
    failed = run(script, *flags.format_map(names).split())
    assert failed.returncode == 2 and words in failed.stderr, failed.stderr
    assert not (place / "new").exists()
