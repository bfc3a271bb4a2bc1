"""`evaluate.py` prints the library's scores, and refuses models and texts that it cannot score."""

import dataclasses
import json

import equinox as eqx
import jax
import pytest
from script_helpers import run_here
from text_cases import published_folder

import eqformer
from eqformer import data, evaluation, generation, models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published_folder(tmp_path_factory.mktemp("evaluate") / "model")


def test_the_figures_are_those_of_the_library(folder, tmp_path):
    texts = ["the first text " * 9, "and a second"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    files = [tmp_path / "0.txt", tmp_path / "1.txt"]
    command = ["--model", folder, "--text", *files, "--window", 40, "--stride", 20, "--batch", 2]
    done = run_here("evaluate.py", *command, "--out", tmp_path / "scores.json")
    assert done.returncode == 0, done.stderr
    scores = evaluation.evaluate_texts(eqformer.load(folder), texts, window=40, stride=20, batch_size=2)
    written = json.loads((tmp_path / "scores.json").read_text())["text"]
    assert written["bits_per_byte"] == pytest.approx(scores.bits_per_byte, rel=1e-6)
    assert written["tokens"] == scores.tokens and f"perplexity {scores.perplexity:.6g}" in done.stdout
    other = evaluation.evaluate_texts(eqformer.load(folder), ["".join(texts)], window=40, stride=20, batch_size=2)
    assert other.bits_per_byte != pytest.approx(scores.bits_per_byte, rel=1e-4)  # the control: texts are apart


@pytest.mark.grid
def test_a_model_of_block_diffusion_is_scored_by_blocks(tmp_path):
    config = models.SDARConfig(256, 16, 2, 2, 1, 24, head_dim=8, block=4)
    model = eqx.filter_jit(models.build)(config, key=jax.random.key(0))
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(model, tmp_path / "model", config=config, files=files)
    (tmp_path / "a.txt").write_text("some text to score")
    command = ["--model", tmp_path / "model", "--text", tmp_path / "a.txt", "--blocks.mask-id", 5]
    llm = dataclasses.replace(eqformer.load(tmp_path / "model"), sampler=generation.BlockSampler(mask_id=5))
    scores = []
    for samples in (32, 3):
        done = run_here("evaluate.py", *command, "--blocks.score-samples", samples)
        assert done.returncode == 0, done.stderr
        sampler = generation.BlockSampler(mask_id=5, score_samples=samples)
        scores.append(evaluation.evaluate_texts(dataclasses.replace(llm, sampler=sampler), ["some text to score"]))
        assert f"perplexity {scores[-1].perplexity:.6g}" in done.stdout
    assert scores[0].nats != scores[1].nats  # the control: few choices are an estimate


def test_what_cannot_be_scored(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text")

    def refused(*flags) -> str:
        done = run_here("evaluate.py", *flags)
        assert done.returncode == 2 and done.stderr.count("error:") == 1, done.stderr
        return done.stderr

    assert "there is nothing to score; give --text" in refused("--model", folder)
    assert "no file or folder" in refused("--model", folder, "--text", tmp_path / "none.txt")
    assert "--batch 0" in refused("--model", folder, "--text", tmp_path / "a.txt", "--batch", 0)
    assert "only one model is loaded" in refused("--model", folder, "--run-dir", "b", "--text", tmp_path / "a.txt")
    assert "the stride must be from 1 to 7" in refused(
        "--model", folder, "--text", tmp_path / "a.txt", "--window", 8, "--stride", 9
    )
