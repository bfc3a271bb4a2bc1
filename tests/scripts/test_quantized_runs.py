"""Runs of low-rank changes beside quantized weights: the same as beside decoded weights, and loaded again."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from format_cases import CASES
from format_folders import is_map
from safetensors.numpy import load_file, save_file
from script_helpers import losses, run_here
from text_cases import published_folder, TEMPLATE

import eqformer
from eqformer import models, nn
from eqformer.text import load_run_model


TALK = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Né, so."}]
FLAGS = (
    "--seq 48 --batch 4 --steps 3 --log-every 1 --checkpoint-every 3 --validate-every 3 --validation-batches 1 "
    "--sample-every 0 --optimizer.name adamw --optimizer.learning-rate 3e-2"
).split()
LORA, KEPT = ["--lora.rank", 4], ["--weights", "quantized"]


def write_quantized(folder: Any) -> None:
    """Store the maps of a published folder in 4 bits (compressed-tensors), of random codes."""
    rng, case = np.random.default_rng(0), CASES["int4"]
    stored: dict[str, np.ndarray] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        parts = case.make(rng, *array.shape)[0] if is_map(name) else {".weight": array}
        if ".weight_scale" in parts:
            parts[".weight_scale"] = parts[".weight_scale"] * np.asarray(0.1, parts[".weight_scale"].dtype)
        stored |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.said}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model in 4 bits, and a file of conversations."""
    folder = tmp_path_factory.mktemp("quantized")
    write_quantized(published_folder(folder / "model", chat_template__jinja=TEMPLATE))
    (folder / "chats.jsonl").write_text("\n".join([json.dumps({"messages": TALK})] * 40))
    return folder


def train(folder: Any, run: Any, *flags: object) -> Any:
    data = ["--model", folder / "model", "--data", folder / "chats.jsonl", "--run-dir", run]
    devices = [] if "--simulate" in flags else ["--simulate", 1]
    done = run_here("pretrain.py", *data, *FLAGS, *flags, *devices)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def kept(folder):
    return train(folder, folder / "kept", *LORA, *KEPT)


@pytest.mark.grid
def test_a_run_beside_kept_weights_is_that_beside_decoded_weights(folder, kept):
    """Losses, the model that it is loaded as, its text, and the folder that is written of it."""
    decoded = train(folder, folder / "decoded", *LORA)
    assert losses(kept) == pytest.approx(losses(decoded), rel=1e-5)
    assert losses(kept)[-1] < losses(kept)[0] - 0.1  # The control: without the changes that are learned, it stays.
    model, plain = load_run_model(kept), load_run_model(decoded)
    maps = [linear for linear in nn.linear_maps(model) if isinstance(linear, nn.QuantizedLinear)]
    assert len(maps) == 7 and {linear.form for linear in maps} == {"int4"}
    published = models.load(folder / "model", weights="quantized")
    codes = lambda tree: [linear.codes for linear in nn.linear_maps(tree) if isinstance(linear, nn.QuantizedLinear)]
    assert all(map(np.array_equal, codes(model), codes(published)))
    assert same(nn.dequantize(nn.merge_lora(model)), nn.merge_lora(plain))
    assert not same(nn.dequantize(nn.without_lora(model)), nn.merge_lora(plain))
    for run in (kept, decoded):
        assert run_here("convert.py", run, folder / f"{run.name} folder").returncode == 0
    assert "quantization_config" not in json.loads((folder / "kept folder" / "config.json").read_text())
    assert same(models.load(folder / "kept folder"), models.load(folder / "decoded folder"))
    texts = {eqformer.load(path).chat(TALK[:1], max_new_tokens=12) for path in (kept, folder / "kept folder")}
    assert len(texts) == 1


def same(one: Any, other: Any) -> bool:
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return all(np.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh",
    [
        "--simulate 2 --mesh.fsdp 2 --zero 3",
        "--simulate 2 --mesh.replica 2",
        "--simulate 2 --mesh.context 2",
        "--simulate 4 --mesh.tensor 2 --mesh.fsdp 2 --zero 2",
    ],
)
def test_it_is_the_same_over_a_mesh_and_goes_on_there(folder, kept, mesh, tmp_path):
    run = train(folder, tmp_path / "run", *LORA, *KEPT, *mesh.split())
    assert losses(run) == pytest.approx(losses(kept), rel=1e-5)
    longer = ["--steps", 5, "--prolong", "hold"]
    (folder / "model" / "model.safetensors").rename(folder / "away")  # A run has its weights.
    try:
        train(folder, run, *LORA, *KEPT, *longer)
    finally:
        (folder / "away").rename(folder / "model" / "model.safetensors")
    uninterrupted = train(folder, tmp_path / "whole", *LORA, *KEPT)
    train(folder, uninterrupted, *LORA, *KEPT, *longer)
    assert len(losses(run)) == 5 and losses(run) == pytest.approx(losses(uninterrupted), rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_beside_kept_weights(folder, tmp_path, loss):
    """The reference is the model without its changes, in the same codes."""
    pair = {"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"}
    labels = [{"prompt": "1 + 1", "completion": f" = {number}", "label": number == 2} for number in (2, 3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ([pair] if loss == "dpo" else labels) * 20)))
    flags = [*LORA, "--data", folder / "rows.jsonl", "--loss", loss]
    kept_losses = losses(train(folder, tmp_path / "kept", *flags, *KEPT))
    decoded_losses = losses(train(folder, tmp_path / "decoded", *flags))
    assert kept_losses == pytest.approx(decoded_losses, rel=1e-4) and kept_losses[-1] != kept_losses[0]


@pytest.mark.grid
def test_another_run_goes_on_from_a_run_with_kept_weights(folder, kept, tmp_path):
    """With its changes beside the codes, or from the sum of both, decoded."""
    start = load_run_model(kept)
    on = train(folder, tmp_path / "on", *LORA, *KEPT, "--from-run", kept, "--optimizer.learning-rate", 1e-12)
    assert same(load_run_model(on), start)
    merged = train(folder, tmp_path / "new", "--from-run", kept, "--optimizer.learning-rate", 1e-12, "--lora.rank", 2)
    assert same(nn.merge_lora(load_run_model(merged)), nn.dequantize(nn.merge_lora(start)))
    other = ["--model", folder / "model", "--from-run", kept, "--run-dir", tmp_path / "x", *KEPT, "--lora.rank", 2]
    refused = run_here("pretrain.py", *other, "--data", folder / "chats.jsonl", "--simulate", 1)
    assert refused.returncode == 2 and "only the low-rank changes of that run go on" in refused.stderr


@pytest.mark.parametrize(
    "flags, words",
    [
        (KEPT, "--weights quantized --lora.rank 0: codes are not trained, but low-rank changes beside them"),
        (["--model", "plain", *LORA, *KEPT], "none of its linear maps is stored in fewer bits"),
        (["--recipe", "llama", *LORA, *KEPT], "--weights quantized: it is a published model's weights"),
    ],
)
def test_what_cannot_stay_quantized_is_one_error(folder, tmp_path, flags, words):
    published_folder(tmp_path / "plain", chat_template__jinja=TEMPLATE)
    flags = [tmp_path / "plain" if flag == "plain" else flag for flag in flags]
    model = [] if {"--model", "--recipe"} & {*map(str, flags)} else ["--model", folder / "model"]
    data = ["--data", folder / "chats.jsonl", "--run-dir", tmp_path / "run", *FLAGS]
    done = run_here("pretrain.py", *model, *data, *flags, *([] if "--simulate" in flags else ["--simulate", 1]))
    assert done.returncode == 2 and words in done.stderr.replace("\n", " ") and not (tmp_path / "run").exists()


@pytest.mark.hf
def test_transformers_chats_with_the_folder_that_is_written(folder, kept, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    torch = pytest.importorskip("torch")
    kinds = transformers.AutoTokenizer, transformers.AutoModelForCausalLM
    assert run_here("convert.py", kept, tmp_path / "out").returncode == 0
    tokenizer, model = (kind.from_pretrained(tmp_path / "out") for kind in kinds)
    prompt = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == eqformer.load(kept).chat(TALK[:1], max_new_tokens=12)
