"""LoRA beside quantized weights: the same results as beside decoded weights, and loading of the run."""

import asyncio
import importlib.util
import json
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from format_cases import CASES
from format_folders import is_map
from safetensors.numpy import load_file, save_file
from script_helpers import losses, rows, run_here
from text_cases import published_folder, TEMPLATE

import eqformer
from eqformer import evaluation, models, nn, parallel, serving
from eqformer.text import load_run_model


TALK = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Né, so."}]
FLAGS = (
    "--seq 48 --batch 4 --steps 3 --log-every 1 --checkpoint-every 3 --validate-every 3 --validation-batches 1 "
    "--sample-every 0 --optimizer.name adamw --optimizer.learning-rate 3e-2"
).split()
HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("torch", "transformers")))
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
    assert refused.returncode == 2 and "low-rank changes belong to the quantized weights" in refused.stderr


@pytest.fixture(scope="module")
def written(folder, kept):
    """The folder that is written of the run beside kept weights."""
    assert run_here("convert.py", kept, folder / "written").returncode == 0
    return folder / "written"


def serve_chat(source: Any) -> str:
    """The greedy answer of `serve.py --model SOURCE`."""
    from serve import Command, make_service

    service = make_service(Command(model=source, slots=2, capacity=64, prefill_chunk=32))
    app = serving.make_app(service, name="tuned")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
            body = {"model": "tuned", "messages": TALK[:1], "temperature": 0, "max_tokens": 12}
            return await client.post("/v1/chat/completions", json=body)

    response = asyncio.run(ask())
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.grid
def test_commands_write_and_score_texts_by_it_as_by_the_folder_that_is_written(folder, kept, written):
    llm = eqformer.load(written)
    answer, text = llm.chat(TALK[:1], max_new_tokens=12), "Né, so. How? " * 5
    (folder / "a.txt").write_text(text)
    bits = evaluation.evaluate_texts(llm, [text], window=40).bits_per_byte

    def answers(*source: Any) -> set[str]:
        sampled = run_here("sample.py", *source, "--prompt", "How?", "--temperature", 0, "--tokens", 12)
        assert sampled.returncode == 0, sampled.stderr
        return {sampled.stdout.removesuffix("\n"), serve_chat(source[-1])}

    def score(*source: Any) -> float:
        out = folder / "scores.json"
        done = run_here("evaluate.py", *source, "--text", folder / "a.txt", "--window", 40, "--out", out)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())["text"]["bits_per_byte"]

    for source in (("--model", kept), ("--run-dir", kept), ("--model", written)):
        assert answers(*source) == {answer} and score(*source) == pytest.approx(bits, rel=1e-4)
    # The control: the model that the run began from.
    assert answer not in answers("--model", folder / "model")
    assert score("--model", folder / "model") != pytest.approx(bits, rel=1e-2)
    # Weights that stay quantized compute the same, with the changes beside them.
    assert answers(*KEPT, "--run-dir", kept) == {answer} and score(*KEPT, "--run-dir", kept) == pytest.approx(
        bits, rel=1e-4
    )
    maps = [nn.linear_maps(eqformer.load(kept, weights=name).model) for name in ("decoded", "quantized")]
    kept_maps = [sum(isinstance(linear, nn.QuantizedLinear) for linear in loaded) for loaded in maps]
    assert kept_maps == [0, 7] and not nn.modules(eqformer.load(kept).model, nn.LoRA)
    plan = parallel.Plan(parallel.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]), zero=3)
    assert eqformer.load(kept, plan=plan).chat(TALK[:1], max_new_tokens=12) == answer
    with pytest.raises(ValueError, match="weights must be 'decoded' or 'quantized'"):
        eqformer.load(kept, weights="int4")


@pytest.mark.grid
def test_an_example_of_a_run_is_shown(folder, kept):
    """The example of the run's own command is that without kept weights."""
    command = ["--model", folder / "model", "--data", folder / "chats.jsonl", "--seq", 48, "--show-example"]
    plain = run_here("pretrain.py", *command, "--run-dir", folder / "none", "--simulate", 1)
    assert plain.returncode == 0 and "[[Né, so.<|endoftext|>]]" in plain.stdout
    for run in (["--run-dir", kept], ["--run-dir", folder / "none"]):
        assert run_here("pretrain.py", *command, *LORA, *KEPT, *run, "--simulate", 1).stdout == plain.stdout
    assert run_here("pretrain.py", "--from-run", kept, *command[2:], "--simulate", 1).stdout == plain.stdout
    assert not (folder / "none").exists()


REWARDS = """
def high(prompts, completions, letter):
    return [sum(ord(character) > 127 for character in text) / 8 for text in completions]
"""


@pytest.mark.grid
def test_rewards_beside_kept_weights(folder, kept, tmp_path):
    """Rewards, losses and divergences are those beside decoded weights, on two devices too."""
    prompts = [{"prompt": [{"role": "user", "content": letter}], "letter": letter} for letter in "abc"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    options = "--batch 8 --group 4 --tokens 8 --seq 32 --steps 3 --log-every 1 --checkpoint-every 3 --sample-every 0 "
    options += "--kl-weight 0.01 --optimizer.name adamw --optimizer.learning-rate 1e-2 --optimizer.warmup 0"
    data = ["--data", tmp_path / "prompts.jsonl", "--reward", f"{tmp_path}/rewards.py:high", *options.split()]
    runs = {
        "kept": [*KEPT, *LORA, "--model", folder / "model", "--simulate", 1],
        "mesh": [*KEPT, *LORA, "--model", folder / "model", "--simulate", 2, "--mesh.fsdp", 2, "--zero", 3],
        "decoded": [*LORA, "--model", folder / "model", "--simulate", 1],
        "on": ["--from-run", kept, "--simulate", 1],
    }
    metrics = {}
    for name, flags in runs.items():
        done = run_here("reinforce.py", *data, *flags, "--run-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
        metrics[name] = rows(tmp_path / name, "reward")
        assert all(row["sampler_difference"] < 1e-5 for row in metrics[name])
    for row, *others in zip(metrics["decoded"], metrics["kept"], metrics["mesh"], strict=True):
        for metric in ("reward", "loss", "kl", "completion_tokens", "grad_norm"):
            assert [other[metric] for other in others] == pytest.approx([row[metric]] * 2, rel=1e-3, abs=1e-6)
    assert metrics["kept"][0]["kl"] < 1e-6 < 1e-3 < metrics["kept"][-1]["kl"]  # The control: the changes are learned.
    assert metrics["on"][0]["kl"] > 0.1  # It goes on from the changes of the first run.
    for name in ("kept", "on"):
        maps = nn.linear_maps(load_run_model(tmp_path / name))
        assert sum(isinstance(linear, nn.QuantizedLinear) for linear in maps) == 7
        assert run_here("convert.py", tmp_path / name, tmp_path / f"{name} folder").returncode == 0
        pair = (tmp_path / name, tmp_path / f"{name} folder")
        assert len({eqformer.load(path).chat(TALK[:1], max_new_tokens=12) for path in pair}) == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        (KEPT, "--weights quantized --lora.rank 0: quantized weights cannot be trained"),
        (["--model", "plain", *LORA, *KEPT], "none of its linear maps is stored in fewer bits"),
        (["--recipe", "llama", *LORA, *KEPT], "--weights quantized: only a published model has quantized weights"),
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
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="the extra `hf` is not installed")  # before the run is trained
def test_transformers_chats_with_the_folder_that_is_written(folder, kept, tmp_path):
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    kinds = transformers.AutoTokenizer, transformers.AutoModelForCausalLM
    assert run_here("convert.py", kept, tmp_path / "out").returncode == 0
    tokenizer, model = (kind.from_pretrained(tmp_path / "out") for kind in kinds)
    prompt = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == eqformer.load(kept).chat(TALK[:1], max_new_tokens=12)
