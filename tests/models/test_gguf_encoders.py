"""Text encoders in GGUF files: tokens, arrays and vectors equal those of the converted models and of llama.cpp."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_gguf import checksum, made, SAID
from test_published import FIXTURES
from tokenizers.normalizers import Precompiled

import eqformer
from eqformer import models, nn
from eqformer.models._gguf_file import GGUF
from eqformer.models._gguf_tokenizer import _is_charsmap
from eqformer.text import TextClassifier, TextEncoder


RECORDED = json.loads((FIXTURES / "gguf_encoders.json").read_text())
CASES, TEXTS = RECORDED["cases"], RECORDED["texts"]
# The text that names special tokens, which llama.cpp's embeddings read as plain text.
WITH_SPECIAL = next(text for text in TEXTS if "[SEP]" in text)
# llama.cpp does not take Korean syllables apart, as the published tokenizers of texts in lower case do.
KOREAN = next(text for text in TEXTS if "안" in text)
# llama.cpp rounds the inputs of a GELU to 16 bits.
BOUNDS = {"nomic-bert": 1e-6, "eurobert": 1e-6, "gemma-embedding": 2e-3}


@pytest.fixture(scope="module")
def files() -> Iterator[Any]:
    """The files that llama.cpp's converter made, and llama.cpp's vectors of the texts, by case."""
    with np.load(FIXTURES / "gguf_encoders.npz") as arrays:
        yield arrays


@pytest.mark.by_default("bert")
@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model_before(name, files, tmp_path):
    """Its arrays bit for bit. RoBERTa's kind has the layers of a BERT, and is read as one of one token type."""
    path, recorded = tmp_path / "a.gguf", CASES[name]
    path.write_bytes(files[name].tobytes())
    config = models.read_config(path)
    attributes = {key: its for key, its in recorded["config"].items() if not key.endswith("_token_id")}
    assert models.is_encoder(path) == (name != "gemma-embedding")
    if "roberta" in attributes["model_type"]:
        attributes = attributes | {"model_type": "bert", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    assert config == models.read_config(tmp_path)
    models.save(models.load(path, head=False), tmp_path / "plain", config=config)
    arrays = load_file(tmp_path / "plain" / "model.safetensors")
    saved = {key.removeprefix(f"{config_prefix(arrays)}."): checksum(array) for key, array in arrays.items()}
    expected = {key: crc for key, crc in recorded["arrays"].items() if not key.startswith("pooler.")}
    assert saved == expected
    assert checksum(next(iter(arrays.values()))[::-1]) not in expected.values()


def config_prefix(arrays: dict[str, np.ndarray]) -> str:
    """The prefix of a base model's arrays, which folders of base models lack; an empty text in such a folder."""
    first = {name.partition(".")[0] for name in arrays}
    return next(iter(first)) if len(first) == 1 else ""


def test_texts_have_the_ids_before_and_those_of_llama_cpp(files, tmp_path):
    for name, recorded in CASES.items():
        (tmp_path / "a.gguf").write_bytes(files[name].tobytes())
        for file, content in models.gguf_companion_files(tmp_path / "a.gguf").items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(content, encoding="utf-8")
        tokenizer = eqformer.data.FileTokenizer(tmp_path / "tokenizer.json", end_of_text=0)
        ids = [row.ids.tolist() for row in tokenizer.encode_texts(TEXTS)]
        assert ids == recorded["ids"], name
        differing = [text for text, found, other in zip(TEXTS, ids, recorded["llama"], strict=True) if found != other]
        assert differing in ([], [KOREAN]) and len({json.dumps(row) for row in ids}) == len(TEXTS)
        pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
        assert pooling == {"pooling_mode": recorded["pooling"]}


@pytest.mark.by_default("nomic-bert")
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_llama_cpp(name, files, tmp_path):
    (tmp_path / "a.gguf").write_bytes(files[name].tobytes())
    encoder = eqformer.load(tmp_path / "a.gguf")
    assert isinstance(encoder, TextEncoder)
    same = [
        n for n, text in enumerate(TEXTS) if text != WITH_SPECIAL and CASES[name]["ids"][n] == CASES[name]["llama"][n]
    ]
    vectors, expected = np.asarray(encoder.embed([TEXTS[n] for n in same])), files[f"{name} vectors"][same]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert len(same) >= len(TEXTS) - 2
    assert np.abs(vectors - expected).max() < BOUNDS.get(name, 5e-4)
    assert np.abs(vectors[::-1] - expected).max() > 0.05
    if models.is_encoder(tmp_path / "a.gguf"):
        with pytest.raises(ValueError, match="load_encoder"):
            eqformer.text.load_llm(tmp_path / "a.gguf")


def test_rules_that_leave_their_table_are_refused(files, tmp_path):
    """Each changed unit of the trie gives an error or a tokenizer that reads all texts, and never a panic."""
    (tmp_path / "a.gguf").write_bytes(files["bert pieces"].tobytes())
    rules = bytes(GGUF(tmp_path / "a.gguf").listed("tokenizer.ggml.precompiled_charsmap"))
    size, refused = int.from_bytes(rules[:4], "little"), 0
    assert _is_charsmap(rules) and not _is_charsmap(rules[:-1]) and not _is_charsmap(rules + b"a")
    assert not _is_charsmap(b"\xff" * 4 + rules[4:])
    rng = np.random.default_rng(0)
    for _ in range(40):
        changed = bytearray(rules)
        for place in 4 + 4 * rng.choice(size // 4, 3):
            changed[place : place + 4] = rng.bytes(4)
        if not _is_charsmap(bytes(changed)):
            refused += 1
            continue
        normalizer = Precompiled(bytes(changed))
        assert all(isinstance(normalizer.normalize_str(text), str) for text in TEXTS)
    assert 0 < refused < 40


_WORDS = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "b", "▁B"],
}
_WORDS |= {"tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1], "tokenizer.ggml.mask_token_id": 0}
_WORDS |= {f"tokenizer.ggml.{name}_token_id": n for n, name in enumerate(("padding", "unknown", "cls", "seperator"))}


def tokenize(path: Path, said: dict[str, Any], *texts: str) -> list[list[int]]:
    """The ids of texts, by the tokenizer of a file with these values."""
    path.write_bytes(made(said))
    files = models.gguf_companion_files(path)
    (path.parent / "tokenizer.json").write_text(files["tokenizer.json"])
    tokenizer = eqformer.data.FileTokenizer(path.parent / "tokenizer.json", end_of_text=0)
    return [row.ids.tolist() for row in tokenizer.encode_texts(list(texts))]


def test_words_are_read_in_lower_case_by_the_files_statement_or_by_its_tokens(tmp_path):
    """A file that states nothing, and has tokens with upper case, is of a cased model."""
    path, small = tmp_path / "a.gguf", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "b", "▁c"]
    lower = {"tokenizer.ggml.normalizer.lowercase": True}
    assert tokenize(path, _WORDS, "ab B", "A á") == [[2, 4, 5, 6, 3], [2, 1, 1, 3]]
    assert tokenize(path, _WORDS | lower, "ab B", "A á") == [[2, 4, 5, 1, 3], [2, 4, 4, 3]]
    assert tokenize(path, _WORDS | {"tokenizer.ggml.tokens": small}, "ab c", "A á") == [[2, 4, 5, 6, 3], [2, 4, 4, 3]]
    kept = lower | {"tokenizer.ggml.normalizer.strip_accents": False}
    assert tokenize(path, _WORDS | kept, "A á") == [[2, 4, 1, 3]]


def test_a_decoder_that_states_its_pooling_is_a_text_encoder(tmp_path):
    tokens = ["a", "b", "ab", *(f"<{number}>" for number in range(9))]
    said = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "gpt-2"}
    said |= {"tokenizer.ggml.eos_token_id": 11, "tokenizer.ggml.add_eos_token": True}
    path = tmp_path / "a.gguf"
    path.write_bytes(made(said))
    assert not isinstance(eqformer.load(path), TextEncoder) and eqformer.text.read_pooling(path) == "lasttoken"
    path = tmp_path / "b.gguf"
    path.write_bytes(made(said | {"llama.pooling_type": 1}))
    encoder = eqformer.load(path)
    assert isinstance(encoder, TextEncoder) and encoder.max_length == 64
    assert eqformer.text.read_pooling(path) == "mean" and encoder.tokenizer.encode_prompt("ab").tolist() == [2, 11]
    assert np.allclose(np.linalg.norm(encoder.embed(["ab"]), axis=1), 1, atol=1e-6)


CLASSIFIERS = ("bert", "bert labels", "modern-bert", "modern-bert labels", "qwen3")


@pytest.mark.by_default("bert")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_has_the_logits_of_transformers(name, tmp_path):
    """The reranker of Qwen3 has the logits of its two answers, in the order of the file's labels."""
    path = tmp_path / "a.gguf"
    with np.load(FIXTURES / "gguf_classifiers.npz") as arrays:
        path.write_bytes(arrays[name].tobytes())
        expected = arrays[f"{name} logits"]
    model: Any = models.load(path)
    ids = jax.numpy.array([[0, 7, 3, 20, 9, 9, 14, 2, 30, 5, 11, 2]])
    tokens = nn.positions_like(ids.shape)
    with jax.default_matmul_precision("highest"):
        hidden = model.encode(ids, tokens)[0]
        logits, others = (np.asarray(model.classify(rows, tokens)[0]) for rows in (hidden, hidden[:, ::-1] + 1))
    assert np.abs(logits - expected).max() < 1e-5 and np.abs(others - expected).max() > 1e-2
    names = ["yes", "no"] if name == "qwen3" else ["bad", "fair", "good"] if "labels" in name else ["LABEL_0"]
    assert [*models.read_label_attributes(path)["id2label"].values()] == names
    assert models.is_classifier(path) and models.read_classifier(path).labels == len(names)


_OF_QWEN = {f"qwen3.{key.removeprefix('llama.')}": value for key, value in SAID.items() if key.startswith("llama.")}
_OF_QWEN |= dict.fromkeys(key for key in SAID if key.startswith("llama.")) | {"general.architecture": "qwen3"}
_OF_QWEN |= {"tokenizer.ggml.tokens": ["a", "b", "ab", *(f"<{number}>" for number in range(9))]}
_OF_QWEN |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 11}
_OF_QWEN |= {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}


def test_a_file_with_labels_is_a_classifier_of_texts(tmp_path):
    norms = {f"blk.0.attn_{name}_norm.weight": np.ones(4, np.float32) for name in "qk"}
    rows, path = np.array([[1] * 8, [-1] * 8], np.float32), tmp_path / "a.gguf"
    for label, stored in (("yes", rows), ("no", rows[::-1])):
        path.write_bytes(made(_OF_QWEN, norms | {"cls.output.weight": np.ascontiguousarray(stored)}))
        classifier = eqformer.load(path)
        assert isinstance(classifier, TextClassifier) and classifier.labels == ("yes", "no")
        classification: Any = classifier.classify("ab")
        assert classification.label == label
    path.write_bytes(made(_OF_QWEN, norms | {"cls.output.weight": rows, "cls.weight": np.ones((8, 8), np.float32)}))
    with pytest.raises(
        ValueError, match=r"the classifier has the arrays \['cls', 'cls.output'\], but for a qwen3 only"
    ):
        models.read_config(path)
    path.write_bytes(made(_OF_QWEN, norms | {"cls.output.bias": np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match=r"the array cls.output.weight is missing"):
        models.read_config(path)
    labels = {"qwen3.classifier.output_labels": ["yes", "no", "perhaps"]}
    path.write_bytes(made(_OF_QWEN | labels, norms | {"cls.output.weight": rows}))
    with pytest.raises(ValueError, match=r"output_labels has 3 labels, but cls.output.weight has 2 rows"):
        models.read_config(path)


_PIECES = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "▁a", "b"]}
_PIECES |= {"tokenizer.ggml.token_type": [3, 3, 2, 1, 1]}
WRONG = {
    "pooling of a reranker": (_WORDS | {"llama.pooling_type": 4}, "pooling_type=4 is not supported; supported are 1"),
    "no separator": (
        {key: number for key, number in _WORDS.items() if "seperator" not in key},
        "7 tokens, but some special tokens have ids outside of these: {'seperator': 102}",
    ),
    "pieces without scores": (_PIECES, "scores must be a finite number for each token"),
    "a charsmap of texts": (
        _PIECES | {"tokenizer.ggml.scores": [1] * 5, "tokenizer.ggml.precompiled_charsmap": ["a"]},
        "precompiled_charsmap must be bytes",
    ),
    "a charsmap that is none": (
        _PIECES | {"tokenizer.ggml.scores": [1] * 5, "tokenizer.ggml.precompiled_charsmap": [9, 0, 0, 0, 1]},
        "charsmap is not a table",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_encoder_that_is_not_what_it_says(name, tmp_path):
    said, words = WRONG[name]
    (tmp_path / "a.gguf").write_bytes(made(said))
    with pytest.raises(ValueError, match=rf"a.gguf.*{words}"):
        models.gguf_companion_files(tmp_path / "a.gguf")
