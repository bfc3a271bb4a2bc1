"""Runs of block diffusion: the first loss by hand, and a bit-for-bit resume over a mesh."""

import dataclasses
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from encoder_runs import losses, run_of, SGD, SIZES

import eqformer
from eqformer import data, evaluation, generation, models, training
from eqformer.recipes import check, Masking, Mesh, Recipe
from eqformer.text import load_run_model, load_tokenizer


CONFIG = models.SDARConfig(256, 16, 2, 2, 1, 24, head_dim=8, block=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"line {line} of text {number}\n" for line in range(20)))
    return folder


def recipe_of(corpus, **fields: Any) -> Recipe:
    options: dict[str, Any] = {"data": corpus, "batch": 8, "optimizer": SGD, "loss": "block-diffusion", **SIZES}
    return Recipe(**{"model": CONFIG, **options, **fields})


@pytest.mark.grid
def test_the_first_loss_is_that_of_the_run_s_own_rows(corpus, tmp_path):
    run = run_of(recipe_of(corpus, sample_every=4), tmp_path / "run")
    texts = data.open_corpus({"corpus": data.files(corpus)}, data.ByteTokenizer(), tmp_path, seq=24, batch=8, seed=0)
    noisy = training.noise_blocks(texts.train.batch(0), jax.random.key(0), mask_id=1, block=3)
    model = eqx.filter_jit(models.build)(CONFIG, key=jax.random.split(jax.random.key(0), 3)[0])
    total, count = eqx.filter_jit(training.block_diffusion_loss)(model, noisy)
    assert losses(run)[0] == pytest.approx(float(total) / (8 * 24), rel=1e-5)
    assert float(training.loss_count(count)) == 8 * 24 != float(np.sum(noisy.weights))
    assert (run.folder / "samples.txt").read_text()


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, context=2), Mesh(fsdp=2, tensor=2)])
def test_a_run_goes_on_bit_by_bit_on_any_mesh(corpus, mesh, tmp_path):
    recipe = recipe_of(corpus, mesh=mesh, optimizer=dataclasses.replace(SGD, rates="constant"))
    whole = run_of(recipe, tmp_path / "whole", 4)
    half = run_of(dataclasses.replace(recipe, steps=2), tmp_path / "half", 4)
    parts = run_of(recipe, half.folder, 4)
    arrays = [jax.tree.leaves(eqx.filter(load_run_model(run.folder), eqx.is_array)) for run in (whole, parts)]
    assert parts.start == 2 and all(map(np.array_equal, *arrays))
    alone = run_of(dataclasses.replace(recipe, mesh=Mesh()), tmp_path / "alone")
    assert losses(alone) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=2, context=2), Mesh(fsdp=2, tensor=2)])
def test_a_run_on_completions_learns_the_answers_only(mesh, tmp_path):
    rows = [{"prompt": f"repeat {number}:", "completion": f" {number} {number}"} for number in range(10, 60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_of(recipe_of(tmp_path / "rows.jsonl", mesh=mesh), tmp_path / "run", 1 if mesh == Mesh() else 4)
    tokenizer = data.ByteTokenizer()
    encoder = data.ConversationEncoder(tokenizer, None)
    texts = data.open_corpus(
        {"rows": data.conversations(tmp_path / "rows.jsonl")},
        encoder,
        tmp_path / "store",
        seq=24,
        batch=8,
        seed=0,
        packing="documents",
    )
    batch = texts.train.batch(0)
    noisy = training.noise_blocks(batch, jax.random.key(0), mask_id=1, block=3, answers_only=True)
    model = eqx.filter_jit(models.build)(CONFIG, key=jax.random.split(jax.random.key(0), 3)[0])
    total, count = eqx.filter_jit(training.block_diffusion_loss)(model, noisy)
    assert float(training.loss_count(count)) == float(np.sum(batch.weights))
    assert losses(run)[0] == pytest.approx(float(total) / float(training.loss_count(count)), rel=1e-5)
    everything = training.noise_blocks(batch, jax.random.key(0), mask_id=1, block=3)
    total, count = eqx.filter_jit(training.block_diffusion_loss)(model, everything)
    assert losses(run)[0] != pytest.approx(float(total) / float(training.loss_count(count)), rel=1e-3)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=2, tensor=2)])
def test_a_run_is_evaluated_by_blocks(corpus, mesh, tmp_path):
    (tmp_path / "book.txt").write_text("line 3 of text 41\nline 4 of text 41\n")
    fields: dict[str, Any] = {"mesh": mesh, "evaluate_every": 2, "evaluate_text": (str(tmp_path / "book.txt"),)}
    run = run_of(recipe_of(corpus, **fields), tmp_path / "run", 1 if mesh == Mesh() else 4)
    name = "evaluation/book.txt/bits_per_byte"
    rows = [row for row in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()) if name in row]
    assert [row["step"] for row in rows] == [0, 2, 4]
    llm = eqformer.load(run.folder)
    expected = evaluation.evaluate_texts(llm, [(tmp_path / "book.txt").read_text()])
    assert rows[-1][name] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    # The control: the model of the first step has another score.
    assert rows[0][name] != pytest.approx(rows[-1][name], rel=1e-4)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published SDAR whose configuration names the mask token 5, and whose tokenizer names none."""
    path = tmp_path_factory.mktemp("published") / "model"
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=24)
    model = eqx.filter_jit(models.build)(CONFIG, key=jax.random.key(0))
    models.save(model, path, config=CONFIG, files=files, attributes={"mask_token_id": 5})
    return path


def published_recipe(corpus, folder) -> Recipe:
    return recipe_of(corpus, model=models.read_config(folder), published=folder)


def test_the_configuration_of_a_published_model_names_the_mask_token(corpus, published, tmp_path):
    check(published_recipe(corpus, published))
    shutil.copytree(published, tmp_path / "model")
    config = json.loads((published / "config.json").read_text())
    del config["mask_token_id"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"--masking.token: the tokenizer has no special token"):
        check(published_recipe(corpus, tmp_path / "model"))


@pytest.mark.grid
def test_a_run_masks_by_the_token_of_its_published_model(corpus, published, tmp_path):
    run = run_of(published_recipe(corpus, published), tmp_path / "run")
    tokenizer, folder = load_tokenizer(published), tmp_path / "tokens"
    folder.mkdir()
    texts = data.open_corpus({"corpus": data.files(corpus)}, tokenizer, folder, seq=24, batch=8, seed=0)
    model, batch = models.load(published), texts.train.batch(0)
    loss = eqx.filter_jit(training.block_diffusion_loss)
    of_mask = lambda mask: loss(model, training.noise_blocks(batch, jax.random.key(0), mask_id=mask, block=3))[0]
    assert losses(run)[0] == pytest.approx(float(of_mask(5)) / (8 * 24), rel=1e-5)
    assert losses(run)[0] != pytest.approx(float(of_mask(1)) / (8 * 24), rel=1e-5)
    assert eqformer.load(run.folder).sampler == generation.BlockSampler(mask_id=5)


def test_recipes_that_cannot_work_are_refused(corpus):
    assert recipe_of(corpus).batch_shapes().ids.shape == (8, 48)
    llama = models.LlamaConfig(256, 16, 2, 2, 1, 24)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": llama}, r"check_block_diffusion\(model\): the masks of the model have no blocks"),
        ({"loss": "next-token"}, "a token attends to later tokens"),
        ({"masking": Masking(share=0.5)}, "--masking is for --loss mlm"),
    ]
    for fields, words in wrong:
        with pytest.raises(ValueError, match=words):
            check(recipe_of(corpus, **fields))
