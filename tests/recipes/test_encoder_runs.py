"""Training of text encoders by contrastive and masked losses: bit-for-bit resume, and loading to embed texts."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_runs import (
    check_it_goes_on,
    CONFIG,
    load,
    losses,
    MESHES,
    run_of,
    SGD,
    SIZES,
    TEXT,
    with_arrays,
    write_rows,
)

from eqformer import data, models, nn, training
from eqformer.recipes import Contrastive, Masking, published_recipe, Recipe
from eqformer.text import export_run, read_pooling


def group(number: int) -> list[str]:
    """An anchor, its positive and a hard negative."""
    return [f"question {number} of {number * 7 % 31}", f"answer {number * 7 % 31}: {number}", f"answer {number + 1}"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 20 rows of groups, and the training and held-out groups."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    names = ("anchor", "positive", "negative")
    parts = write_rows(file, [dict(zip(names, group(number))) for number in range(20)])
    return file, *([list(row.values()) for row in part] for part in parts)


def contrastive(rows, **fields) -> Recipe:
    """A recipe whose batch is all training groups."""
    file, groups, _ = rows
    options: dict[str, Any] = {
        "batch": 3 * len(groups),
        "contrastive": Contrastive(temperature=0.1, group=3),
        "optimizer": SGD,
    }
    return Recipe(**{"model": CONFIG, "loss": "contrastive", "data": file, "text": TEXT, **options, **SIZES, **fields})


def first_model():
    """The model of a new run of seed 0."""
    return eqx.filter_jit(models.build)(CONFIG, key=jax.random.split(jax.random.key(0), 3)[0])


def embed_groups(encoder, groups) -> np.ndarray:
    """The vectors of each group's texts, which are embedded together, so that few programs are compiled."""
    vectors = encoder.embed([text for texts in groups for text in texts], batch_size=64)
    return np.asarray(vectors, np.float64).reshape(len(groups), 3, -1)


def formula(vectors, temperature=0.1) -> float:
    """The mean loss of all groups together, in float64, from the vectors that an encoder returns."""
    vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    candidates = vectors[:, 1:].reshape(-1, vectors.shape[-1])
    scores = vectors[:, 0] @ candidates.T / temperature
    numbers = np.arange(len(vectors))
    return float(np.mean(np.log(np.exp(scores).sum(-1)) - scores[numbers, 2 * numbers]))


@pytest.mark.grid
def test_a_run_learns_groups_and_its_folder_embeds(rows, tmp_path):
    """The first loss and the last validation are the formula's, where the last batch of the epoch is half padding."""
    _, groups, held_out = rows
    assert 2 < len(held_out) < len(groups)
    run = run_of(contrastive(rows), tmp_path / "run")
    end = load(run.folder)
    start = dataclasses.replace(end, model=with_arrays(end.model, nn.without_head(first_model())))
    count, all_groups = len(groups), [*groups, *held_out]
    first, last = (embed_groups(encoder, all_groups) for encoder in (start, end))
    assert losses(run)[0] == pytest.approx(formula(first[:count]), rel=1e-5)
    assert losses(run)[0] != pytest.approx(formula(first[1:count]), rel=1e-3)  # the control
    assert run.metrics["validation_loss"] == pytest.approx(formula(last[count:]), rel=1e-4)
    assert losses(run)[-1] < losses(run)[0] and 0 <= run.metrics["retrieval_accuracy"] <= 1
    assert "validation_bits_per_byte" not in run.metrics
    export_run(run.folder, tmp_path / "published")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config["architectures"] == ["BertModel"] and read_pooling(tmp_path / "published") == "mean"
    vectors = embed_groups(load(tmp_path / "published"), all_groups)
    assert np.array_equal(vectors, last) and not np.allclose(vectors, first, atol=1e-3)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("loss", ["contrastive", "mlm"])
def test_a_run_goes_on_bit_by_bit_on_any_mesh(loss, mesh, rows, corpus, tmp_path):
    of_loss = {"contrastive": lambda **fields: contrastive(rows, batch=12, **fields), "mlm": masked(corpus)}[loss]
    check_it_goes_on(of_loss(mesh=mesh, optimizer=dataclasses.replace(SGD, rates="constant")), tmp_path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"line {line} of text {number}\n" for line in range(20)))
    return folder


def masked(corpus):
    options: dict[str, Any] = {"model": CONFIG, "loss": "mlm", "data": corpus, "batch": 8, "optimizer": SGD, **SIZES}
    return lambda **fields: Recipe(**{**options, **fields})


@pytest.mark.grid
def test_a_run_learns_masked_tokens(corpus, tmp_path):
    """The first loss is that of the run's own rows, masked by the same key, by the model in one plain pass."""
    recipe = masked(corpus)(masking=Masking(share=0.4))
    run = run_of(recipe, tmp_path / "run")
    source, tokenizer = data.files(corpus), data.ByteTokenizer()
    texts = data.open_corpus({"corpus": source}, tokenizer, tmp_path, seq=24, batch=8, seed=0)
    batch = texts.train.batch(0)
    options: dict[str, Any] = {"mask_id": 1, "vocab": 256, "mlm_probability": 0.4, "special_ids": (0, 1)}
    wanted = training.mask_tokens(batch, jax.random.key(0), **options)
    logits = np.float64(eqx.filter_jit(first_model())(jnp.asarray(wanted.ids))[0])
    nats = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(wanted.targets)[..., None], -1)[..., 0]
    )
    chosen = np.asarray(wanted.weights) > 0
    assert 0.3 < chosen.mean() < 0.5
    assert losses(run)[0] == pytest.approx(nats[chosen].mean(), rel=1e-5)
    assert losses(run)[0] != pytest.approx(nats.mean(), rel=1e-4)  # the control
    assert load(run.folder).embed(["a text", "another"]).shape == (2, 32)


@pytest.mark.grid
def test_a_run_on_groups_starts_from_one_on_masked_tokens(corpus, tmp_path):
    run = run_of(masked(corpus)(), tmp_path / "run")
    tuned = Recipe(CONFIG, loss="contrastive", from_run=run.folder, data=tmp_path / "rows.jsonl", batch=4, **SIZES)
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(("anchor", "positive"), group(n)))) for n in range(40))
    )
    second = run_of(dataclasses.replace(tuned, optimizer=SGD), tmp_path / "second")
    assert second.step == 4 and second.metrics["loss"] < 3


@pytest.mark.grid
def test_a_published_encoder_is_tuned_with_lora(rows, tmp_path):
    model = eqx.filter_jit(models.build)(CONFIG, key=jax.random.key(3))
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    files["modules.json"] = json.dumps([{"path": name, "type": kind} for name, kind in kinds.items()])
    files["1_Pooling/config.json"] = json.dumps({"pooling_mode": "mean", "include_prompt": False})
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    files["config_sentence_transformers.json"] = json.dumps(prompts)
    models.save(model, tmp_path / "model", config=CONFIG, files=files)
    published = dataclasses.replace(load(tmp_path / "model"), default_prompt=None)
    file, groups, _ = rows
    text = dataclasses.replace(Recipe(CONFIG).text, validation=0.3)
    options: dict[str, Any] = {
        "data": file,
        "text": text,
        "loss": "contrastive",
        "contrastive": Contrastive(temperature=0.1, group=3),
    }
    recipe = published_recipe(
        tmp_path / "model", lora=training.Lora(rank=2), batch=3 * len(groups), optimizer=SGD, **options, **SIZES
    )
    run = run_of(recipe, tmp_path / "run")
    saved = json.loads((run.folder / "recipe.json").read_text())["recipe"]["contrastive"]
    assert saved["pooling"] == "mean"
    assert losses(run)[0] == pytest.approx(
        formula(embed_groups(dataclasses.replace(published, max_length=24), groups)), rel=1e-5
    )
    tuned = load(run.folder)
    assert not nn.modules(tuned.model, nn.LoRA)
    vectors = tuned.embed(groups[0])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, rtol=1e-5)
    assert tuned.prompts == {"query": "query: "} and not np.allclose(vectors, tuned.embed(groups[0], prompt=""))
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(*(jax.tree.leaves(eqx.filter(x.model, eqx.is_array)) for x in (tuned, published)))
    ]
    assert 0 < sum(changed) <= 8  # weights of queries, keys, values and outputs alone
    export_run(run.folder, tmp_path / "published")
    exported = load(tmp_path / "published")
    assert np.array_equal(exported.embed(groups[0]), vectors) and not exported.includes_prompt


GOOD = {"anchor": "a", "positive": "b"}


@pytest.mark.parametrize(
    "row,message",
    [
        (
            {"anchor": "a", "answer": "b"},
            r"rows.jsonl#1 must have `anchor` and `positive`.* `answer`|has anchor \(str\)",
        ),
        ({"anchor": "a", "positive": 3}, r"rows.jsonl#1 must have .* positive \(int\)"),
        ({"anchor": " ", "positive": "b"}, "rows.jsonl#1: `anchor` has no text; leave the row out"),
        (GOOD | {"negative": "c"}, r"--contrastive.group 2: .*rows.jsonl#1 has 3 texts.* give group=3"),
        ([1], "rows.jsonl#1 must have `anchor` and `positive`"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(x) for x in [GOOD, row, *[GOOD] * 40]))
    recipe = Recipe(CONFIG, loss="contrastive", data=tmp_path / "rows.jsonl", batch=4, optimizer=SGD, **SIZES)
    with pytest.raises(ValueError, match=message):
        run_of(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"loss": "contrastive", "data": None}, "^--loss contrastive: groups of texts are read from a file"),
        ({"loss": "contrastive", "batch": 3}, "^--contrastive.group 2 --batch 3: a group has at least"),
        ({"loss": "contrastive", "contrastive": Contrastive(temperature=0.0)}, "^--contrastive.temperature 0.0: "),
        ({"loss": "contrastive", "contrastive": Contrastive(dims=(8, 4))}, "^--contrastive.dims 8 4: "),
        ({"loss": "mlm", "contrastive": Contrastive(temperature=0.1)}, "--contrastive is for --loss contrastive"),
        ({"loss": "contrastive", "masking": Masking(share=0.1)}, "--masking is for --loss mlm"),
        ({"loss": "mlm", "masking": Masking(share=0.0)}, "^--masking.share 0.0: "),
        ({"loss": "mlm", "masking": Masking(token="[MASK]")}, r"^--masking.token \[MASK\]: the tokenizer has no"),
        ({"loss": "mlm", "model": models.preset("llama-byte-1m")}, "^--loss mlm: in a LlamaConfig no token sees"),
        ({"loss": "mlm", "seq": 65}, "^--seq 65: the model has 64 learned positions"),
        ({"loss": "mlm", "evaluate_every": 2, "evaluate_text": ("x",)}, "^--loss mlm --evaluate-every: a text encoder"),
        ({"loss": "next-token"}, "a token attends to later tokens"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(fields, message, corpus, tmp_path):
    recipe = Recipe(**{"model": CONFIG, "data": corpus, "batch": 4, "optimizer": SGD, **SIZES, **fields})
    with pytest.raises(ValueError, match=message):
        run_of(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
