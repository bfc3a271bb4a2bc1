"""Labels and scores of texts, of pairs of texts and of tokens: a classifier with its tokenizer and its labels."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .. import data, models, nn, parallel
from .._annotation_checks import fits
from .._files import JsonObject, read_json
from ..data import EncodedText
from ._companions import read_lengths
from ._text_encoder import check_texts, hidden_vectors, limit_length, load_text_tokenizer, map_batches, Texts


Pair = tuple[str, str]


class Classification(NamedTuple):
    """The likeliest label of a text, and the probabilities of all labels."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class TokenLabel(NamedTuple):
    """The likeliest label of a token; the token is the text from the character `start` up to `stop`."""

    text: str
    label: str
    probability: float
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class TextClassifier:
    """A classifier of texts, of pairs of texts or of tokens, with its tokenizer and its labels.

    `load` returns the `TextClassifier` of a folder of transformers' `ForSequenceClassification` and
    `ForTokenClassification` models, such as rerankers and reward models.
    """

    model: nn.Transformer
    """The model with its classifier."""
    tokenizer: data.ByteTokenizer | data.FileTokenizer
    """The tokenizer of texts."""
    labels: tuple[str, ...]
    """The name of each label."""
    max_length: int | None = None
    """Number of tokens to which longer texts are cut; None: texts of any length are read whole."""
    is_multi_label: bool = False
    """Whether a text may have several labels, each with a probability of its own."""
    activation: str = "sigmoid"
    """The function that `score` applies to logits: `"sigmoid"`, or `"identity"` for the logits themselves."""
    reads_types: bool = True
    """Whether the model reads the tokenizer's token types, which tell the two texts of a pair apart."""
    pad_id: int | None = None
    """The id that pooling leaves out, even at the end of a text; None: all tokens of a text are pooled."""
    plan: parallel.Plan | None = None
    """The plan that shards the model over a mesh; None: one device."""

    @property
    def classifies_tokens(self) -> bool:
        """Whether each token has a label."""
        return self.model.classifier is not None and self.model.classifier.pooling is None

    @overload
    def classify(self, texts: str, *, batch_size: int = 32) -> Classification | list[TokenLabel]: ...
    @overload
    def classify(self, texts: Texts, *, batch_size: int = 32) -> list[Classification] | list[list[TokenLabel]]: ...
    def classify(self, texts: Any, *, batch_size: int = 32) -> Any:
        """Classify a text, or each text of a list; a classifier of tokens returns the labels of a text's tokens.

        Probabilities are a softmax over the labels. If the model has one label, or if a text may have several labels,
        each label's probability is the sigmoid of its logit. Special tokens have no label. Raises a `ValueError` for an
        empty list and for anything but texts.
        """
        rows = check_texts("classify(texts)", texts)
        encoded = self.tokenizer.encode_texts(rows, max_length=self.max_length)
        logits = self._logits(encoded, batch_size)
        label = self._label_tokens if self.classifies_tokens else self._label_text
        results = [label(text, row, scores) for text, row, scores in zip(rows, encoded, logits, strict=True)]
        return results[0] if isinstance(texts, str) else results

    @overload
    def score(self, texts: str | Pair, *, activation: str | None = None, batch_size: int = 32) -> float: ...
    @overload
    def score(
        self, texts: list[str] | Sequence[Pair], *, activation: str | None = None, batch_size: int = 32
    ) -> Float[np.ndarray, "texts *labels"]: ...
    def score(self, texts: Any, *, activation: str | None = None, batch_size: int = 32) -> Any:
        """Return the score of each pair of texts in a list, such as a question and an answer, or of each text.

        A single text, or a single tuple of two texts, returns one score. A model with several labels returns a score
        for each label. Scores are the model's `activation` of the logits, as in sentence-transformers'
        `CrossEncoder.predict`; `"identity"` returns the logits, such as the reward of a reward model. Pairs of more
        tokens than `max_length` are cut at the end of the longer text. Raises a `ValueError` for an empty list, and for
        anything but texts or pairs of texts.
        """
        is_single = isinstance(texts, str) or (isinstance(texts, tuple) and _is_pair(texts))
        rows = [texts] if is_single else texts
        call, name = "score(texts)", self.activation if activation is None else activation
        if name not in ("sigmoid", "identity"):
            raise ValueError(f"score(activation={name!r}): it must be 'sigmoid' or 'identity'.")
        if self.classifies_tokens:
            raise ValueError(f"{call}: the model labels tokens, so a text has no score; take classify.")
        if isinstance(rows, list | tuple) and rows and all(map(_is_pair, rows)):
            pairs = [(str(first), str(second)) for first, second in rows]
            encoded = self.tokenizer.encode_texts(pairs, max_length=self.max_length)
        else:
            encoded = self.tokenizer.encode_texts(check_texts(call, rows), max_length=self.max_length)
        logits = np.stack(self._logits(encoded, batch_size))
        scores = _sigmoid(logits) if name == "sigmoid" else logits
        scores = scores[:, 0] if len(self.labels) == 1 else scores
        if not is_single:
            return scores
        return float(scores[0]) if scores.ndim == 1 else scores[0]

    def _logits(self, rows: Sequence[EncodedText], batch_size: int) -> list[np.ndarray]:
        """Return the logits of each text, or of each token of each text."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 text is read at a time.")

        def run(ids: Array, tokens: nn.Tokens) -> Array:
            tokens = tokens if self.reads_types else tokens.replace(types=None)
            return _classify_rows(self.model, self.plan, self.pad_id, ids, tokens)

        return map_batches(run, rows, batch_size, self.plan)

    def _probabilities(self, logits: Float[np.ndarray, "*tokens labels"]) -> Float[np.ndarray, "*tokens labels"]:
        if self.is_multi_label or len(self.labels) == 1:
            return _sigmoid(logits)
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return exponentials / exponentials.sum(axis=-1, keepdims=True)

    def _label_text(self, text: str, row: EncodedText, logits: Float[np.ndarray, "labels"]) -> Classification:
        probabilities = self._probabilities(logits)
        best = int(np.argmax(probabilities))
        by_label = dict(zip(self.labels, map(float, probabilities), strict=True))
        return Classification(self.labels[best], float(probabilities[best]), by_label)

    def _label_tokens(self, text: str, row: EncodedText, logits: Float[np.ndarray, "width labels"]) -> list[TokenLabel]:
        probabilities = self._probabilities(logits)
        labeled = []
        for (start, stop), is_special, scores in zip(row.spans.tolist(), row.is_special, probabilities):
            if not is_special:
                best = int(np.argmax(scores))
                labeled.append(TokenLabel(text[start:stop], self.labels[best], float(scores[best]), start, stop))
        return labeled


def _is_pair(value: object) -> bool:
    """Return whether a value is a list or a tuple of two texts."""
    return fits(value, tuple[str, ...] | list[str]) and len(value) == 2


def _sigmoid(logits: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return (1 / (1 + np.exp(-np.clip(logits, -80, 80)))).astype(np.float32)


@eqx.filter_jit
def _classify_rows(
    model: nn.Transformer,
    plan: parallel.Plan | None,
    pad_id: int | None,
    ids: Int[Array, "batch seq"],
    tokens: nn.Tokens,
) -> Float[Array, "batch *seq labels"]:
    hidden = hidden_vectors(model, plan, ids, tokens)
    if pad_id is not None:  # A text of padding alone keeps its first token, as in transformers.
        is_left_out = (ids == pad_id) & (tokens.positions > 0)
        tokens = tokens.replace(positions=jnp.where(is_left_out, -1, tokens.positions))
    return model.classify(hidden, tokens).astype(jnp.float32)


def load_classifier(
    source: str | Path,
    *,
    answers: tuple[str, str] | None = None,
    plan: parallel.Plan | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: str = "decoded",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextClassifier:
    """Load a classifier of texts or of tokens with its tokenizer and its labels.

    Args:
        source: A folder of transformers' `ForSequenceClassification` or `ForTokenClassification` model, the name of
            such a model of the hub, or a GGUF file of a classifier or reranker.
        answers: Two tokens by which a language model classifies a text, such as `("yes", "no")` of Qwen3-Reranker;
            None: the folder holds a classifier. The text must end where the model's answer begins. The score of the
            text is the logit of the first token minus the logit of the second; the sigmoid of the score is the
            probability of the first token among the two.
        plan: The plan that shards the model over a mesh; None: one device. The scores are the same.
        dtype: The dtype of all weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored; `"decoded"` decodes them.
        progress: A function that is called with the number of bytes read so far, and of all bytes.

    Raises:
        ValueError: For a folder of another model.
    """
    path, call = models.local_path(source), f"load_classifier({str(source)!r})"
    if answers is not None:
        return _load_answers(source, path, answers, plan, dtype, weights, progress)
    if not path.exists() or not models.is_classifier(path):
        raise ValueError(
            f"{call}: the folder's config.json names no model ForSequenceClassification or "
            "ForTokenClassification; take text.load_encoder or text.load_llm, or give answers= of a language model."
        )
    model = models.load(path, plan=plan, dtype=dtype, weights=weights, progress=progress)
    model = model if plan is None else plan.shard(model)
    attributes, folder = models.read_label_attributes(path), models.companion_folder(path)
    assert model.classifier is not None
    (count,) = model.classifier.output.output_shape
    return TextClassifier(
        model,
        load_text_tokenizer(call, folder),
        _label_names(attributes, count),
        max_length=limit_length(model, read_lengths(folder)[0], folder),
        is_multi_label=attributes.get("problem_type") == "multi_label_classification",
        activation=_read_activation(folder, attributes, count),
        reads_types=reads_token_types(folder),
        pad_id=_read_pad_id(model, attributes),
        plan=plan,
    )


def _load_answers(
    source: str | Path,
    path: Path,
    answers: tuple[str, str],
    plan: parallel.Plan | None,
    dtype: jax.typing.DTypeLike | None,
    weights: str,
    progress: Callable[[int, int], None],
) -> TextClassifier:
    """Load a language model as a classifier by the logits of two answers."""
    call = f"load_classifier({str(source)!r}, answers={answers!r})"
    if not path.is_dir() or models.is_encoder(path) or models.is_classifier(path):
        raise ValueError(f"{call}: answers are tokens of a language model; give the folder of a language model.")
    tokenizer = load_text_tokenizer(call, path)
    ids = [tokenizer.encode(answer) for answer in answers]
    if len(answers) != 2 or any(len(row) != 1 for row in ids):
        counts = " and ".join(str(len(row)) for row in ids)
        raise ValueError(f"{call}: each answer must be one token, but the answers have {counts} tokens; give others.")
    model = models.load(path, plan=plan, dtype=dtype, weights=weights, progress=progress)
    if model.logit_softcap is not None or model.logit_bias is not None or model.encoder is not None:
        raise ValueError(f"{call}: the model's logits are no linear map of its last token's vector.")
    table = model.embedding.weight if model.head is None else model.head.matrix()
    first, second = (table[int(row[0])].astype(jnp.float32) for row in ids)
    scale = 1.0 if model.logit_scale is None else model.logit_scale
    shapes = eqx.filter_eval_shape(nn.Linear, "embed -> labels", embed=len(first), labels=1, key=jax.random.key(0))
    output = eqx.tree_at(lambda linear: linear.weight, shapes, scale * (first - second)[None])
    head = nn.ClassificationHead(nn.Pooling(("lasttoken",)), None, output)
    model = dataclasses.replace(nn.without_head(model), classifier=head)
    model = model if plan is None else plan.shard(model)
    max_length = limit_length(model, read_lengths(path)[0], path)
    return TextClassifier(model, tokenizer, (answers[0],), max_length, plan=plan)


def read_label_names(folder: str | Path) -> tuple[str, ...]:
    """Return the names of the labels of a published classifier; raise a `ValueError` for a folder of another model."""
    return _label_names(models.read_label_attributes(folder), models.read_classifier(folder).labels)


def _label_names(attributes: JsonObject, count: int) -> tuple[str, ...]:
    """Return the name of each label; `LABEL_0`, `LABEL_1`, ... if the config has no names, as in transformers."""
    names = attributes.get("id2label")
    if not isinstance(names, dict):
        return tuple(f"LABEL_{number}" for number in range(count))
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))


def _read_activation(path: Path, attributes: JsonObject, labels: int) -> str:
    """Return the `activation` in sentence-transformers' settings; by default, a sigmoid for a model with one label."""
    file = path / "config_sentence_transformers.json"
    settings = [read_json(file) if file.exists() else {}, attributes.get("sentence_transformers")]
    stated = [part.get("activation_fn") for part in settings if isinstance(part, dict)]
    for name in (*stated, attributes.get("sbert_ce_default_activation_function")):
        class_name = name.rpartition(".")[2] if isinstance(name, str) else ""
        if class_name in ("Sigmoid", "Identity"):
            return class_name.lower()
    return "sigmoid" if labels == 1 else "identity"


def _read_pad_id(model: nn.Transformer, attributes: JsonObject) -> int | None:
    """Return the id of padding for a classifier that pools the last token; None for other classifiers.

    The pooling skips this id, as in transformers, even at the end of a text: in many reward models, padding and the end
    of text have the same id.
    """
    head = model.classifier
    if head is None or head.pooling is None or head.pooling.modes != ("lasttoken",):
        return None
    text_attributes = attributes.get("text_config")
    pad_id = (text_attributes if isinstance(text_attributes, dict) else attributes).get("pad_token_id")
    return pad_id if isinstance(pad_id, int) else None


def reads_token_types(folder: str | Path) -> bool:
    """Return whether a published model reads token types.

    False only if the tokenizer's settings list the model's inputs without token types.
    """
    file = Path(folder) / "tokenizer_config.json"
    names = read_json(file).get("model_input_names") if file.exists() else None
    return not isinstance(names, list) or "token_type_ids" in names
