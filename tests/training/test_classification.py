"""The classification loss against its formula in float64, transformers' loss, and one device."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from encoder_folders import PAIRS, TEXTS, write_encoder
from nn_reference import random_module
from plan_parity import compiled_for, differences, under

from eqformer import data, kernels, LabelBatch, models, nn, text, training
from eqformer.parallel import make_mesh, Plan
from eqformer.training import loss_count
from eqformer.training.losses._loss_aux import loss_metrics


ROWS, SEQ = 8, 8
LENGTHS = np.array([3, 5, 1, 7, 4, 2, 6, 8])
DRAWN = np.random.default_rng(0)
LABELS = {
    "one label": (3, np.array([0, 2, 1, 1, 0, 2, 2, 1], np.int32)),
    "several labels": (3, DRAWN.integers(0, 2, (ROWS, 3)).astype(np.float32)),
    "a number": (1, DRAWN.normal(size=ROWS).astype(np.float32)),
}
BERT = models.BERTConfig(64, 16, 4, 4, 32, max_seq=16)
LLAMA = models.LlamaConfig(vocab=64, embed=16, layers=4, heads=4, kv_heads=2, mlp=32)


def batch_of(name: str) -> LabelBatch:
    ids = np.random.default_rng(1).integers(0, 64, (ROWS, SEQ)).astype(np.int32)
    positions = np.where(np.arange(SEQ) < LENGTHS[:, None], np.arange(SEQ), -1).astype(np.int32)
    weights = (positions >= 0).astype(np.float32)
    return LabelBatch(ids, ids, weights, np.arange(ROWS, dtype=np.int32), positions, labels=LABELS[name][1])


def model_of(config: Any, labels: int, dtype: str = "float32") -> nn.Transformer:
    build = lambda: models.build(config, classifier=models.Classifier(labels), key=jax.random.key(0))
    apply = lambda model: nn.with_execution(nn.Precision(dtype, dtype).apply(model), core=kernels.ReferenceAttention())
    return random_module(lambda: apply(build()))


@pytest.mark.parametrize("name", LABELS)
def test_the_loss_is_the_formula(name):
    labels, values = LABELS[name]
    with jax.enable_x64(True):
        model, batch = model_of(LLAMA, labels, "float64"), batch_of(name)
        tokens = training.batch_tokens(batch)
        classify = eqx.filter_jit(lambda model, ids: model.classify(model.encode(ids, tokens)[0], tokens))
        logits = np.asarray(classify(model, batch.ids))
        if name == "one label":
            chosen = np.exp(logits)[np.arange(ROWS), values] / np.exp(logits).sum(1)
            want, accuracy = -np.log(chosen).sum(), np.mean(logits.argmax(1) == values)
        elif name == "several labels":
            p = 1 / (1 + np.exp(-logits))
            want = -np.sum(values * np.log(p) + (1 - values) * np.log(1 - p)) / 3
            accuracy = np.mean((p > 0.5) == (values == 1))
        else:
            want, accuracy = np.sum((logits[:, 0] - values) ** 2), None
        loss = eqx.filter_jit(training.classification_loss)
        total, aux = loss(model, batch)
        assert float(total) == pytest.approx(want, rel=1e-12) and float(loss_count(aux)) == ROWS
        metrics = {key: float(value / weight) for key, (value, weight) in loss_metrics(aux).items()}
        assert metrics == ({} if accuracy is None else {"accuracy": pytest.approx(accuracy)})
        moved = dataclasses.replace(batch, labels=np.roll(values, 1, axis=0))
        assert abs(float(loss(model, moved)[0]) / want - 1) > 1e-3


CASES = {
    "bert, tensor": (BERT, {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    "bert, stages": (BERT, {"fsdp": 2, "pipe": 2}, {"schedule": "1f1b", "microbatches": 2}),
    "llama, tensor": (LLAMA, {"fsdp": 2, "tensor": 2}, {"residual": "replicated", "microbatches": 2}),
    "llama, context": (LLAMA, {"context": 2, "pipe": 2}, {"schedule": "gpipe", "microbatches": 2}),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_any_mesh_has_the_gradients_of_one_device(name):
    config, mesh, choices = CASES[name]
    with jax.enable_x64(True):
        model, batch = model_of(config, 3, "float64"), batch_of("one label")
        plan = Plan(make_mesh(**mesh, devices=jax.devices()[: int(np.prod([*mesh.values()]))]), **choices)
        alone = compiled_for(training.make_gradient_function(training.classification_loss), model, batch)
        want = alone(batch)
        assert differences(under(plan, model, batch, training.classification_loss), want, 1e-11) == {}
        moved = dataclasses.replace(batch, labels=np.roll(LABELS["one label"][1], 1))
        assert differences(alone(moved), want, 1e-11) != {}


def test_texts_and_what_is_refused(tmp_path):
    write_encoder(tmp_path, "roberta reranker")
    classifier = text.load_classifier(tmp_path)
    batch = data.batch_labelled_texts(PAIRS, [0.5, 1.0, 0.0, 0.25], classifier.tokenizer, seq=20)
    logits = classifier.score(PAIRS, activation="identity")
    want = np.sum((np.asarray(logits) - np.array([0.5, 1, 0, 0.25])) ** 2)
    loss = eqx.filter_jit(training.classification_loss)
    assert float(loss(classifier.model, batch)[0]) == pytest.approx(float(want), rel=1e-4)
    with pytest.raises(ValueError, match="each of the 6 texts needs a label, but the labels have shape"):
        data.batch_labelled_texts(TEXTS, [1, 2], classifier.tokenizer, seq=20)
    with pytest.raises(ValueError, match="the model must have a classifier of texts"):
        training.classification_loss(models.shapes(LLAMA), batch)
    with pytest.raises(ValueError, match="3 outputs takes a whole number from 0 to 2"):
        wrong = dataclasses.replace(batch_of("one label"), labels=np.ones((ROWS, 2), np.float32))
        loss(model_of(LLAMA, 3), wrong)


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LABELS)
def test_transformers_has_the_same_loss(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch")
    labels, values = LABELS[name]
    model, batch = model_of(BERT, labels), batch_of(name)
    models.save(model, tmp_path / "model", config=BERT)
    kind = {"one label": "single_label", "several labels": "multi_label"}.get(name)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", problem_type=f"{kind}_classification" if kind else "regression"
    )
    mask = torch.tensor(np.asarray(batch.positions) >= 0).long()
    target = torch.tensor(values).long() if name == "one label" else torch.tensor(values)
    want = theirs.eval()(torch.tensor(batch.ids).long(), attention_mask=mask, labels=target).loss
    total, aux = training.classification_loss(model, batch)
    assert float(total / loss_count(aux)) == pytest.approx(want.item(), rel=1e-5)
