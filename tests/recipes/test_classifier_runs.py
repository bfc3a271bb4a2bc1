"""Training of classifiers of texts and of pairs, from a file of rows to a folder that classifies."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from encoder_folders import write_encoder
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

from eqformer import models, nn, training
from eqformer.recipes import Labels, published_recipe, Recipe
from eqformer.recipes._texts import complete_recipe
from eqformer.text import export_run


LABELS = ("even", "odd", "zero")


def row(number: int) -> dict[str, Any]:
    """A text and its label, and its second text where the row is a pair."""
    return {"text": f"a text number {number}", "label": "zero" if number % 5 == 0 else LABELS[number % 2]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 20 rows, and the training and held-out rows."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return file, *write_rows(file, [row(number) for number in range(20)])


def recipe_of(rows, **fields) -> Recipe:
    """A recipe whose batch is all training rows."""
    file, train_rows, _ = rows
    options: dict[str, Any] = {"batch": len(train_rows), "optimizer": SGD, "model": CONFIG, "text": TEXT}
    return Recipe(**{"loss": "classification", "data": file, **options, **SIZES, **fields})


def logits_of(classifier, rows) -> np.ndarray:
    """The logits of texts or pairs in float64, which are read together, so that few programs are compiled."""
    texts = [(row["text"], row["text_pair"]) if "text_pair" in row else row["text"] for row in rows]
    return np.asarray(classifier.score(texts, activation="identity"), np.float64)


def formula(logits, rows, names=LABELS) -> tuple[float, float]:
    """The mean nats of the labels in float64 from a classifier's logits, and the share of texts that are right."""
    labels = [names.index(row["label"]) for row in rows]
    nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(rows)), labels]
    return float(nats.mean()), float(np.mean(logits.argmax(-1) == labels))


@pytest.mark.grid
def test_a_run_learns_labels_and_its_folder_classifies(rows, tmp_path):
    """The first loss and the last validation are the formula's, where the last batch of the epoch is half padding."""
    _, train_rows, held_out = rows
    assert 2 < len(held_out) < len(train_rows)
    run = run_of(recipe_of(rows), tmp_path / "run")
    end = load(run.folder)
    key = jax.random.split(jax.random.key(0), 3)[0]
    start_model = eqx.filter_jit(models.build)(CONFIG, classifier=models.Classifier(3), key=key)
    start = dataclasses.replace(end, model=with_arrays(end.model, start_model))
    count, all_rows = len(train_rows), [*train_rows, *held_out]
    first, last = (logits_of(classifier, all_rows) for classifier in (start, end))
    assert end.labels == LABELS and losses(run)[0] == pytest.approx(formula(first[:count], train_rows)[0], rel=1e-5)
    assert losses(run)[0] != pytest.approx(formula(first[1:count], train_rows[1:])[0], rel=1e-4)  # the control
    loss, accuracy = formula(last[count:], held_out)
    assert run.metrics["validation_loss"] == pytest.approx(loss, rel=1e-4)
    assert run.metrics["validation_accuracy"] == pytest.approx(accuracy)
    assert losses(run)[-1] < losses(run)[0] and 0 <= run.metrics["accuracy"] <= 1
    assert "validation_bits_per_byte" not in run.metrics
    export_run(run.folder, tmp_path / "published")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"] == {"0": "even", "1": "odd", "2": "zero"}
    texts = [row["text"] for row in all_rows]
    assert {text.label for text in end.classify(texts)} <= {*LABELS}
    assert np.array_equal(load(tmp_path / "published").score(texts), end.score(texts))
    with pytest.raises(ValueError, match="an adapter has no classifier"):
        export_run(run.folder, tmp_path / "adapter", adapter=True)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_goes_on_bit_by_bit_on_any_mesh(mesh, rows, tmp_path):
    recipe = recipe_of(rows, mesh=mesh, batch=8, optimizer=dataclasses.replace(SGD, rates="constant"))
    check_it_goes_on(recipe, tmp_path)


def pair_rows() -> list[dict[str, Any]]:
    texts = "what is a panda", "a bear", "the giant panda is a bear", "hi there"
    pairs = [(first, second) for first in texts for second in texts if first != second]
    return [
        {"text": first, "text_pair": second, "label": ("no", "yes")[len(first) < len(second)]}
        for first, second in pairs * 3
    ]


@pytest.mark.grid
def test_pairs_are_read_with_types_and_tuned_with_lora(tmp_path):
    """A published BERT tells the two texts of a pair by their types, in training as in `score`."""
    (tmp_path / "model").mkdir()
    write_encoder(tmp_path / "model", "bert mean")
    train_rows, held_out = write_rows(tmp_path / "rows.jsonl", pair_rows())
    options = {"loss": "classification", "data": tmp_path / "rows.jsonl", "text": TEXT, "optimizer": SGD, **SIZES}
    lora = training.Lora(rank=2)
    recipe = published_recipe(tmp_path / "model", lora=lora, batch=len(train_rows), **options)
    run = run_of(recipe, tmp_path / "run")
    end, names = load(run.folder), ("no", "yes")
    assert run.metrics["validation_loss"] == pytest.approx(
        formula(logits_of(end, held_out), held_out, names)[0], rel=1e-5
    )
    without_types = logits_of(dataclasses.replace(end, reads_types=False), held_out)
    assert run.metrics["validation_loss"] != pytest.approx(formula(without_types, held_out, names)[0], rel=1e-4)
    assert not nn.modules(end.model, nn.LoRA)
    before = models.load(tmp_path / "model", head=False)
    assert np.array_equal(end.model.embedding.weight, before.embedding.weight)  # only factors and classifier changed
    key = jax.random.split(jax.random.key(0), 3)[0]
    first = models.with_classifier(before, models.read_config(tmp_path / "model"), models.Classifier(2), key=key)
    heads = [jax.tree.leaves(eqx.filter(x.classifier, eqx.is_array)) for x in (end.model, first)]
    assert not any(map(np.array_equal, *heads))
    export_run(run.folder, tmp_path / "published")
    texts = [(row["text"], row["text_pair"]) for row in held_out]
    np.testing.assert_allclose(load(tmp_path / "published").score(texts), end.score(texts), atol=1e-6)


@pytest.mark.grid
def test_a_decoder_reads_numbered_labels(rows, tmp_path):
    """Labels that are numbers stand for the names of `labels`; a further run goes on with the same classifier."""
    config = models.LlamaConfig(vocab=256, embed=16, layers=2, heads=4, kv_heads=2, mlp=32)
    numbered = [{"text": row["text"], "label": LABELS.index(row["label"])} for row in map(row, range(20))]
    parts = write_rows(tmp_path / "rows.jsonl", numbered)
    recipe = recipe_of((tmp_path / "rows.jsonl", *parts), model=config, classification=Labels(labels=LABELS))
    run = run_of(recipe, tmp_path / "run")
    end, named = load(run.folder), [row | {"label": LABELS[row["label"]]} for row in parts[1]]
    assert end.labels == LABELS
    assert run.metrics["validation_loss"] == pytest.approx(formula(logits_of(end, named), named)[0], rel=1e-4)
    second = run_of(dataclasses.replace(recipe, from_run=run.folder), tmp_path / "second")
    assert losses(second)[0] < losses(run)[0]


GOOD = {"text": "a", "label": "x"}


@pytest.mark.parametrize(
    "row,message",
    [
        ({"text": "a", "answer": "b"}, r"rows.jsonl#1 must have `text`.* but has text \(str\), answer \(str\)"),
        ({"text": "a", "label": True}, r"rows.jsonl#1 must have .* label \(bool\)"),
        ({"text": "a", "label": 0.5}, r"rows.jsonl#1 must have .* label \(float\)"),
        ({"text": " ", "label": "x"}, "rows.jsonl#1: `text` has no text; leave the row out"),
        (GOOD | {"text_pair": "c"}, "rows.jsonl#1: bytes have no token between the texts of a pair"),
        (GOOD | {"label": "z"}, "rows.jsonl#1: the label 'z' is not one of x, y"),
        (GOOD | {"label": 2}, "rows.jsonl#1: the label 2 is not one of x, y"),
        ([1], "rows.jsonl#1 must have `text`"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    good = [GOOD, GOOD | {"label": "y"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(x) for x in [GOOD, row, *good * 20]))
    recipe = recipe_of((tmp_path / "rows.jsonl", [GOOD], []), batch=4, classification=Labels(labels=("x", "y")))
    with pytest.raises(ValueError, match=message):
        run_of(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    "rows,fields,message",
    [
        ([GOOD], {}, "^--classification.labels x: a classifier needs at least two labels"),
        ([GOOD], {"classification": Labels(labels=("x", "y"))}, "all rows have the label 'x', so there is nothing"),
        ([GOOD, GOOD | {"label": 0}], {}, "the labels are 0, x; give only names"),
        ([GOOD | {"label": 1}, GOOD | {"label": 2}], {}, "the labels are 1, 2; give only names"),
        ([GOOD], {"data": None}, "^--loss classification: labelled texts are read from a file"),
        ([GOOD], {"loss": "mlm", "classification": Labels(labels=("x", "y"))}, "--classification is for --loss cl"),
        ([GOOD], {"classification": Labels(labels=("x", "x"))}, "^--classification.labels x x: a classifier needs"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(rows, fields, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 30)))
    with pytest.raises(ValueError, match=message):
        run_of(recipe_of((tmp_path / "rows.jsonl", rows, []), batch=4, **fields), tmp_path / "run")


def test_a_published_classifier_that_does_not_fit_is_refused(tmp_path):
    """A classifier of tokens, and another pooling, each with its own words."""
    (tmp_path / "model").mkdir()
    write_encoder(tmp_path / "model", "bert mean")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"id2label": {"0": "no", "1": "yes"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    options: dict[str, Any] = {"loss": "classification", "data": tmp_path / "rows.jsonl", "text": TEXT, **SIZES}

    def complete(architecture: str, pooling: Any) -> Labels:
        folder = tmp_path / "model"
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        recipe = published_recipe(folder, classification=Labels(pooling=pooling), **options)
        return complete_recipe(recipe).classification

    assert complete("BertForSequenceClassification", None).labels == ("no", "yes")  # the control
    with pytest.raises(ValueError, match="scores each token, not a text; take a classifier of texts, or a model with"):
        complete("BertForTokenClassification", None)
    message = "--classification.pooling mean: the published classifier pools texts as its family does; leave the pool"
    with pytest.raises(ValueError, match=message):
        complete("BertForSequenceClassification", "mean")


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_transformers_reads_the_exported_folder(rows, tmp_path):
    """Its classes have the labels and the logits, of texts of several lengths at once."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch")
    for config in (CONFIG, models.LlamaConfig(vocab=256, embed=16, layers=2, heads=4, kv_heads=2, mlp=32)):
        name = type(config).__name__
        run = run_of(recipe_of(rows, model=config), tmp_path / name)
        export_run(run.folder, tmp_path / f"{name} published")
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / f"{name} published").eval()
        assert theirs.config.id2label == dict(enumerate(LABELS))
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / f"{name} published")
        tokenizer.pad_token = tokenizer.eos_token
        texts = ["a text number 7", "a text number 11", "a"]
        with torch.no_grad():
            inputs = tokenizer(texts, return_tensors="pt", padding=True)
            logits = theirs(**{key: inputs[key] for key in ("input_ids", "attention_mask")}).logits
        ours = load(run.folder).score(texts, activation="identity")
        np.testing.assert_allclose(ours, logits.numpy(), atol=1e-5)
        assert np.abs(ours - ours[::-1]).max() > 1e-4  # the control
