"""Classifiers of texts, pairs and tokens have transformers' logits, and scores as sentence-transformers' rerankers."""

import dataclasses
import functools
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_folders import CLASSIFIERS, FIXTURES, PAIRS, TEXTS, write_encoder
from haste import same_trees
from nn_reference import random_module
from safetensors.numpy import load_file

import eqformer
from eqformer import data, models, parallel, text


@pytest.fixture(scope="module")
def logits():
    with np.load(FIXTURES / "encoders.npz") as file:
        return {key: file[key] for key in file if key.partition("/")[0] in CLASSIFIERS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each recorded classifier, which is written when it is first asked for."""
    place, written = tmp_path_factory.mktemp("classifiers"), dict[str, Path]()

    def write(name: str) -> Path:
        if name not in written:
            written[name] = place / name
            written[name].mkdir()
            write_encoder(written[name], name)
        return written[name]

    return write


@pytest.fixture(scope="module")
def classifiers(folders):
    """Each recorded classifier, which is loaded when it is first asked for."""
    return functools.cache(lambda name: text.load_classifier(folders(name)))


def difference(one, other):
    return np.max(np.abs(np.asarray(one) - other))


OF_TEXTS = [name for name in CLASSIFIERS if "tokens" not in name]


@pytest.mark.by_default("bert reranker", "llama reward", "modernbert mean")
@pytest.mark.parametrize("name", OF_TEXTS)
def test_scores_are_transformers_logits(name, classifiers, logits):
    classifier = classifiers(name)
    texts, pairs = (classifier.score(rows, activation="identity", batch_size=8) for rows in (TEXTS, PAIRS))
    want = np.stack([logits[f"{name}/{number}"] for number in range(len(TEXTS) + len(PAIRS))])
    want = want[:, 0] if want.shape[1] == 1 else want
    assert difference(texts, want[: len(TEXTS)]) < 1e-5 and difference(pairs, want[len(TEXTS) :]) < 1e-5
    assert difference(pairs[::-1], want[len(TEXTS) :]) > 1e-2


@pytest.mark.grid
@pytest.mark.parametrize("name", OF_TEXTS)
def test_scores_of_small_batches_and_of_single_pairs_are_those_of_all(name, classifiers, logits):
    classifier = classifiers(name)
    want = np.stack([logits[f"{name}/{number}"] for number in range(len(TEXTS) + len(PAIRS))])
    want = want[:, 0] if want.shape[1] == 1 else want
    texts = classifier.score(TEXTS, activation="identity", batch_size=4)
    assert difference(texts, want[: len(TEXTS)]) < 1e-5 and difference(texts[::-1], want[: len(TEXTS)]) > 1e-2
    assert difference(classifier.score(PAIRS[0], activation="identity"), want[len(TEXTS)]) < 1e-5


@pytest.mark.parametrize("name", [name for name in OF_TEXTS if "reranker" in name])
def test_rerankers_score_as_a_cross_encoder(name, classifiers, logits):
    """One has a sigmoid by default, and the other the identity, by its `config.json`."""
    classifier = classifiers(name)
    scores = classifier.score(PAIRS)
    assert scores.shape == (len(PAIRS),) and difference(scores, logits[f"{name}/scores"]) < 1e-5
    assert classifier.activation == ("sigmoid" if name == "bert reranker" else "identity")
    swapped = classifier.score([(second, first) for first, second in PAIRS])
    assert difference(scores, swapped) > 1e-3 and isinstance(classifier.score(PAIRS[1]), float)


def test_labels_and_probabilities(classifiers, logits):
    softmax, sigmoids, default = map(classifiers, ("distilbert labels", "roberta several labels", "modernbert mean"))
    for classifier, name in ((softmax, "distilbert labels"), (sigmoids, "roberta several labels")):
        result, want = classifier.classify(TEXTS)[1], np.exp(logits[f"{name}/1"].astype(np.float64))
        want = want / want.sum() if name == "distilbert labels" else want / (1 + want)
        assert list(result.probabilities) == ["bad", "fair", "good"]
        assert difference(list(result.probabilities.values()), want) < 1e-5
        assert result.label == ["bad", "fair", "good"][int(np.argmax(want))]
        assert result.probability == result.probabilities[result.label]
    assert abs(sum(sigmoids.classify("a dog").probabilities.values()) - 1) > 1e-2
    assert default.labels == ("LABEL_0", "LABEL_1")


@pytest.mark.by_default("bert tokens", "qwen3 tokens")
@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if "tokens" in name])
def test_tokens_have_labels(name, classifiers, logits):
    classifier = classifiers(name)
    for number, (line, labels) in enumerate(zip(TEXTS, classifier.classify(TEXTS))):
        want = logits[f"{name}/{number}"]
        first = 0 if name == "qwen3 tokens" else 1
        want = want[first : first + len(labels)]
        assert [label.label for label in labels] == [classifier.labels[best] for best in np.argmax(want, axis=1)]
        weights = np.exp(want - want.max(axis=1, keepdims=True))
        assert (
            difference([label.probability for label in labels], (weights / weights.sum(1, keepdims=True)).max(1)) < 1e-5
        )
        assert all(line[label.start : label.stop] == label.text for label in labels)
        assert " ".join(label.text for label in labels).startswith("the cat" if number == 0 else "")
    with pytest.raises(ValueError, match="the model labels tokens, so a text has no score; take classify"):
        classifier.score("a dog")


@pytest.mark.by_default(
    *("bert tokens", "distilbert labels", "gte tokens", "llama padded by its end"),
    *("modernbert mean", "nomic_bert labels", "roberta reranker"),
)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_folders_go_back_out(name, folders, tmp_path):
    source = folders(name)
    arrays, model = load_file(source / "model.safetensors"), models.load(source)
    assert model.classifier is not None
    config = models.read_config(source)
    models.save(model, tmp_path / "like", like=source)
    models.save(model, tmp_path / "config", config=config)
    for folder in ("like", "config"):
        back = load_file(tmp_path / folder / "model.safetensors")
        assert back.keys() == arrays.keys() and all(np.array_equal(back[key], arrays[key]) for key in arrays)
        assert same_trees(models.load(tmp_path / folder), model)
    changed = eqx.tree_at(lambda tree: tree.embedding.weight, model, replace_fn=lambda weight: weight + 1)
    assert not same_trees(changed, model)  # the control
    base = models.load(source, head=False)
    assert base.classifier is None and np.array_equal(base.embedding.weight, model.embedding.weight)


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, pytest.param({"pipe": 3}, marks=pytest.mark.grid)])
def test_any_mesh_has_the_same_scores(sizes, tmp_path, logits):
    write_encoder(tmp_path, "bert reranker")
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    classifier = text.load_classifier(
        tmp_path, plan=parallel.Plan(parallel.make_mesh(**sizes, devices=devices), zero=3)
    )
    assert difference(classifier.score(PAIRS), logits["bert reranker/scores"]) < 1e-5


def test_a_built_classifier_and_what_is_refused(tmp_path, classifiers):
    model = random_module(models.build, "llama-byte-1m", classifier=models.Classifier(2), key=jax.random.key(0))
    assert model.head is None and model.classifier is not None and model.classifier.output.shape == (2, 128)
    with pytest.raises(ValueError, match="the family t5 has no classifiers"):
        models.shapes("t5-small", classifier=models.Classifier(2))
    with pytest.raises(ValueError, match=r"predictor=True.* a classifier takes the place of the head that a predictor"):
        models.shapes("deepseek-v3-byte-500k", predictor=True, classifier=models.Classifier(2))
    with pytest.raises(ValueError, match=r"Classifier\(labels=0\): a classifier has at least 1 label"):
        models.Classifier(0)
    classifier = classifiers("bert reranker")
    wrong = {"it is an empty list": [], "text 0 is a tuple": [("a", "b"), "c"], "text 1 is a NoneType": ["a", None]}
    for error, texts in wrong.items():
        with pytest.raises(ValueError, match=error):
            classifier.score(texts)
    with pytest.raises(ValueError, match=r"score\(activation='softmax'\): it must be 'sigmoid' or 'identity'"):
        classifier.score(PAIRS, activation="softmax")
    write_encoder(tmp_path, "bert reranker")
    assert isinstance(eqformer.load(tmp_path), text.TextClassifier)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="names no model ForSequenceClassification"):
        text.load_classifier(tmp_path)
    assert dataclasses.replace(classifier, activation="identity").score("a dog") != classifier.score("a dog")


@pytest.mark.parametrize("name", ["bert-byte-200k", "llama-byte-1m"])
def test_a_pooling_that_no_attribute_states_is_not_saved(name, tmp_path):
    config = models.preset(name)
    model = random_module(models.build, config, classifier=models.Classifier(2, pooling="mean"), key=jax.random.key(0))
    with pytest.raises(ValueError, match="the classifier's pooling is 'mean', but the family's published classifiers"):
        models.save(model, tmp_path / "folder", config=config)
    assert not (tmp_path / "folder").exists()


@pytest.mark.by_default("gpt2-byte-1m", "llama-byte-1m")
@pytest.mark.parametrize("name", ["gpt2-byte-1m", "gpt-neox-byte-500k", "llama-byte-1m"])
def test_names_of_decoders_classifiers(name, tmp_path):
    """GPT-2's and GPT-NeoX's heads for tokens have a name of their own in transformers; Llama's have one name."""
    config, token_name = models.preset(name), "score" if name.startswith("llama") else "classifier"
    for classifies_tokens, wanted in (
        (False, {"score.weight"}),
        (True, {f"{token_name}.weight", f"{token_name}.bias"}),
    ):
        classifier = models.Classifier(2, classifies_tokens)
        model = random_module(models.build, config, classifier=classifier, key=jax.random.key(0))
        folder = tmp_path / str(classifies_tokens)
        models.save(model, folder, config=config)
        names = load_file(folder / "model.safetensors").keys()
        assert {key for key in names if key.startswith(("score.", "classifier."))} == wanted
        assert same_trees(models.load(folder), model)


def test_answers_of_a_language_model(tmp_path):
    """As of Qwen3-Reranker: the probability of one answer of two, by the logits behind a text."""
    config = models.preset("llama-byte-1m")
    model = eqx.filter_jit(models.build)(config, key=jax.random.key(0))
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(model, tmp_path / "llama", config=config, files=files)
    reranker = text.load_classifier(tmp_path / "llama", answers=("y", "n"))
    lines = ["Is a cat an animal? ", "No? "]
    scores = reranker.score(lines)
    ids = jnp.asarray([list(line.encode().ljust(20, b" ")) for line in lines], jnp.int32)
    logits = np.asarray(eqx.filter_jit(lambda model: model(ids)[0])(model), np.float64)
    for line, score, row in zip(lines, scores, logits):
        last = row[len(line) - 1]  # Causal attention: padding changes no logits before it.
        assert difference(1 / (1 + np.exp(last[ord("n")] - last[ord("y")])), score) < 1e-6
    assert difference(scores, 1 - scores) > 1e-3 and reranker.labels == ("y",)
    with pytest.raises(ValueError, match="each answer must be one token, but the answers have 3 and 2 tokens"):
        text.load_classifier(tmp_path / "llama", answers=("yes", "no"))
    write_encoder(tmp_path, "bert reranker")
    with pytest.raises(ValueError, match="answers are tokens of a language model"):
        text.load_classifier(tmp_path, answers=("y", "n"))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^load_classifier\(.*the folder has no tokenizer.json"):
        text.load_classifier(tmp_path)
