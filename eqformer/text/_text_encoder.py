"""Vectors of texts: a text encoder with its tokenizer, pooling and prompts."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .. import data, models, nn, parallel
from .._annotation_checks import name_class
from .._shapes import next_power_of_two
from ..data import EncodedText
from ._companions import check_truncation_side, EmbeddingHead, MODULES, read_encoder_files, stated_max_length


Texts = list[str] | tuple[str, ...]
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
"""The functions of `TextEncoder.similarity`, by the names of sentence-transformers."""
_MIN_WIDTH = 16  # tokens of a row


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A text encoder with its tokenizer, which turns texts into vectors.

    `load` returns the `TextEncoder` of a published folder. The vectors are the same as by sentence-transformers'
    `encode`.
    """

    model: nn.Transformer
    """The model without a head; its `encode` returns the hidden vectors of the tokens."""
    head: EmbeddingHead
    """The pooling of the hidden vectors, and the layers after the pooling."""
    tokenizer: data.ByteTokenizer | data.FileTokenizer
    """The tokenizer of texts."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts that are put before a text, by name, such as `{"query": "query: "}`."""
    default_prompt: str | None = None
    """The name of the prompt for texts that are embedded without an explicit prompt; None: no prompt."""
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled too."""
    max_length: int | None = None
    """Number of tokens to which longer texts are cut; None: texts of any length are read whole."""
    similarity_name: str = "cosine"
    """The function by which vectors of texts are compared: a name in `SIMILARITIES`."""
    lower_case: bool = False
    """Whether texts are read in lower case."""
    plan: parallel.Plan | None = None
    """The plan that shards the model over a mesh; None: one device."""

    @overload
    def embed(
        self,
        texts: str,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        batch_size: int = 32,
    ) -> Float[np.ndarray, "features"]: ...
    @overload
    def embed(
        self,
        texts: Texts,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        batch_size: int = 32,
    ) -> Float[np.ndarray, "texts features"]: ...
    def embed(
        self,
        texts: Any,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        batch_size: int = 32,
    ) -> Float[np.ndarray, "*texts features"]:
        """Return the vector of a text, or one row for each text of a list, in float32.

        A text of more tokens than `max_length` is cut at its end, as in sentence-transformers. Texts of similar lengths
        are read together, in rows of a few widths, so that few programs are compiled.

        Args:
            texts: A text, or a list of texts.
            prompt_name: The name of a prompt of `prompts` that is put before each text; None: the default prompt.
            prompt: The text of a prompt, in place of `prompt_name`.
            truncate_dim: The number of leading channels to keep, for models that are trained for this (Matryoshka).
            normalize: Whether vectors are divided by their length, after they are truncated.
            batch_size: Number of texts that are read together.

        Raises:
            ValueError: For an empty list, for anything but texts, for an unknown prompt, and for a `truncate_dim` that
                is not between 1 and the channels of a vector.
        """
        prompt = self._find_prompt(prompt_name, prompt)
        rows = self._encode([prompt + text for text in check_texts("embed(texts)", texts)], self.max_length)
        vectors = self.embed_tokens(
            rows, prompt=prompt, truncate_dim=truncate_dim, normalize=normalize, batch_size=batch_size
        )
        return vectors[0] if isinstance(texts, str) else vectors

    def tokenize(self, texts: Texts, *, prompt_name: str | None = None) -> list[EncodedText]:
        """Return the tokens of whole texts of any length, after a prompt of `prompts` (None: the default prompt).

        Raises a `ValueError` for an unknown prompt, and for anything but texts.
        """
        prompt = self._find_prompt(prompt_name, None)
        return self._encode([prompt + text for text in check_texts("tokenize(texts)", texts)], None)

    def embed_tokens(
        self,
        rows: Sequence[EncodedText],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        batch_size: int = 32,
    ) -> Float[np.ndarray, "texts features"]:
        """Return the vectors of texts from their tokens.

        Raises a `ValueError` as `embed` does, and for a text without a token.

        Args:
            rows: The tokens of each text, as `tokenize` returns them with the same prompt.
            prompt_name: The name of the prompt that the tokens begin with; None: the default prompt.
            prompt: The text of a prompt, in place of `prompt_name`.
            truncate_dim: The number of leading channels to keep.
            normalize: Whether vectors are divided by their length, after they are truncated.
            batch_size: Number of texts that are read together.
        """
        if batch_size < 1:
            raise ValueError(f"embed(batch_size={batch_size}): at least 1 text is read at a time.")
        prompt = self._find_prompt(prompt_name, prompt)
        skipped = 0 if self.includes_prompt or not prompt else self._prompt_length(prompt)

        def run(ids: Array, tokens: nn.Tokens) -> Array:
            return _embed_rows(self.model, self.head, self.plan, ids, tokens, jnp.asarray(skipped, jnp.int32))

        vectors = np.stack(map_batches(run, rows, batch_size, self.plan))
        vectors = self._truncate(vectors, truncate_dim)
        if normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def similarity(
        self, vectors: Float[np.ndarray, "*rows _"], others: Float[np.ndarray, "*columns _"]
    ) -> Float[np.ndarray, "rows columns"]:
        """Return the similarity of each of `vectors` to each of `others`, by `similarity_name`.

        Distances are negated, so that the greatest number is the nearest vector. A single vector counts as one row.
        """
        first, second = np.atleast_2d(np.asarray(vectors, np.float32)), np.atleast_2d(np.asarray(others, np.float32))
        if first.shape[1] != second.shape[1]:
            raise ValueError(
                f"similarity(vectors, others): the vectors have {first.shape[1]} and {second.shape[1]} channels; give "
                "vectors of one model, truncated alike."
            )
        if self.similarity_name == "euclidean":
            return -np.linalg.norm(first[:, None] - second[None], axis=-1)
        if self.similarity_name == "manhattan":
            return -np.sum(np.abs(first[:, None] - second[None]), axis=-1)
        if self.similarity_name == "cosine":
            first, second = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12) for x in (first, second))
        return first @ second.T

    def _find_prompt(self, name: str | None, prompt: str | None) -> str:
        """Return the text that is put before each text; an empty text if there is no prompt."""
        if prompt is not None and name is not None:
            raise ValueError(f"embed(prompt_name={name!r}, prompt={prompt!r}): give one prompt.")
        if prompt is not None:
            return prompt
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ValueError(f"embed(prompt_name={name!r}): the model's prompts are {known}; give one, or prompt=.")
        return self.prompts[name]

    def _encode(self, texts: Sequence[str], max_length: int | None) -> list[EncodedText]:
        texts = [text.lower() for text in texts] if self.lower_case else texts
        return self.tokenizer.encode_texts(texts, max_length=max_length)

    def _prompt_length(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, with the special tokens before the prompt."""
        (row,) = self._encode([prompt], self.max_length)
        return len(row.ids) - int(len(row.ids) > 0 and row.ids[-1] in self.tokenizer.special_ids)

    def _truncate(self, vectors: Float[np.ndarray, "texts features"], channels: int | None) -> np.ndarray:
        if channels is None:
            return vectors
        if not 1 <= channels <= vectors.shape[1]:
            raise ValueError(
                f"embed(truncate_dim={channels}): a vector has {vectors.shape[1]} channels; keep at least 1 of them."
            )
        return vectors[:, :channels]


def check_texts(call: str, texts: object) -> list[str]:
    """Return a text, or several texts, as a list; raise a `ValueError` that begins with `call` for anything else."""
    rows = [texts] if isinstance(texts, str) else texts
    if not isinstance(rows, list | tuple) or not rows:
        description = "an empty list" if rows == [] or rows == () else name_class(rows)
        raise ValueError(f"{call}: texts are a text or a list of at least one text, but it is {description}.")
    if wrong := [index for index, row in enumerate(rows) if not isinstance(row, str)]:
        raise ValueError(f"{call}: text {wrong[0]} is {name_class(rows[wrong[0]])}; give texts.")
    return list(rows)


def map_batches(
    run: Callable[[Int[Array, "batch seq"], nn.Tokens], Array],
    rows: Sequence[EncodedText],
    batch_size: int,
    plan: parallel.Plan | None = None,
) -> list[np.ndarray]:
    """Return the results of `run` for each text, in the order of the texts.

    `run` reads batches of texts of similar lengths, the longest first, padded to one of a few widths. With a plan,
    devices share the rows of a batch evenly.
    """
    if empty := [number for number, row in enumerate(rows) if not len(row.ids)]:
        raise ValueError(
            f"text {empty[0]} has no token, and the tokenizer adds none around it; give at least one character."
        )
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    devices = 1 if plan is None else math.prod(map(plan.size, plan.batch_axes)) * plan.microbatches
    results = (run(*_pad_batch([rows[number] for number in batch], batch_size, devices)) for batch in batches)
    arrays: list[np.ndarray] = [np.empty(0)] * len(rows)
    # Each result is copied to the host after the next batch has started. The device therefore never waits, and its
    # memory holds at most two batches.
    current = next(results, None)
    for batch in batches:
        following = next(results, None)
        for number, array in zip(batch, np.asarray(current)):
            arrays[number] = array
        current = following
    return arrays


def padded_width(length: int) -> int:
    """Return the width of rows for texts of up to `length` tokens: a power of two, or three quarters of one."""
    power = next_power_of_two(length, least=_MIN_WIDTH)
    three_quarters = power * 3 // 4
    return three_quarters if length <= three_quarters and power > _MIN_WIDTH else power


def _pad_batch(rows: Sequence[EncodedText], batch_size: int, devices: int) -> tuple[Int[Array, "batch seq"], nn.Tokens]:
    """Return texts as rows of one width.

    Rows of one token fill the batch up to a power of two (at most `batch_size`), and then up to a multiple of the
    number of devices.
    """
    count = -(-min(batch_size, next_power_of_two(len(rows))) // devices) * devices
    width = padded_width(max(len(row.ids) for row in rows))
    ids, types = np.zeros((2, count, width), np.int32)
    lengths = np.ones(count, np.int32)
    for number, row in enumerate(rows):
        lengths[number] = len(row.ids)
        ids[number, : len(row.ids)], types[number, : len(row.ids)] = row.ids, row.types
    return jnp.asarray(ids), nn.right_padded(jnp.asarray(lengths), width).replace(types=jnp.asarray(types))


@eqx.filter_jit
def _embed_rows(
    model: nn.Transformer,
    head: EmbeddingHead,
    plan: parallel.Plan | None,
    ids: Int[Array, "batch seq"],
    tokens: nn.Tokens,
    skipped: Int[Array, ""],
) -> Float[Array, "batch features"]:
    return head(hidden_vectors(model, plan, ids, tokens), tokens, skipped).astype(jnp.float32)


def hidden_vectors(
    model: nn.Transformer, plan: parallel.Plan | None, ids: Int[Array, "batch seq"], tokens: nn.Tokens
) -> Float[Array, "batch seq embed"]:
    """Return the hidden vectors of a model on one device, or under its plan.

    Token types are left out for a model without vectors of token types, such as RoBERTa.
    """
    tokens = tokens if model.reads_types else tokens.replace(types=None)
    return model.encode(ids, tokens)[0] if plan is None else plan.encode(model, ids, tokens)


def load_encoder(
    source: str | Path,
    *,
    pooling: str | None = None,
    plan: parallel.Plan | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: str = "decoded",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextEncoder:
    """Load a text encoder with its tokenizer, pooling, dense layers and prompts.

    Args:
        source: A published folder, as sentence-transformers or transformers write it, one file of GGUF, or the name of
            a model of the hub.
        pooling: How the vector of a text is made from the vectors of its tokens: a name in `nn.POOLINGS`; None: as the
            folder's `modules.json` states, or, for an encoder without this file, the mean, as in sentence-transformers.
        plan: The plan that shards the model over a mesh; None: one device. The vectors are the same.
        dtype: The dtype of the model's weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored; `"decoded"` decodes them.
        progress: A function that is called with the number of bytes read so far, and of all bytes.

    Raises:
        ValueError: For a decoder if neither `pooling` nor a `modules.json` states its pooling, and for unsupported
            settings in the folder's files.
    """
    path = models.local_path(source)
    call = f"load_encoder({str(source)!r})"
    if not path.exists():
        raise ValueError(f"{call}: there is no such file or folder; correct the path.")
    companions = models.companion_folder(path)
    files = read_encoder_files(companions)
    model_path = path if path.is_file() else files.folder
    if pooling is not None:
        files = dataclasses.replace(files, head=EmbeddingHead(nn.Pooling((pooling,))))
    elif not (companions / MODULES).exists() and not models.is_encoder(model_path):
        raise ValueError(
            f"{call}: the model is a decoder, and no {MODULES} or GGUF file states how its vectors are pooled; "
            f"give pooling=, one of {', '.join(nn.POOLINGS)}, such as 'lasttoken'."
        )
    if files.similarity not in SIMILARITIES:
        raise ValueError(
            f"{call}: similarity_fn_name={files.similarity!r}: it must be one of {', '.join(SIMILARITIES)}."
        )
    tokenizer = load_text_tokenizer(call, files.folder)
    model = models.load(model_path, plan=plan, dtype=dtype, weights=weights, head=False, progress=progress)
    if model.encoder is not None:
        raise ValueError(f"{call}: the model has an encoder and a decoder; give a model that is only one of the two.")
    if plan is not None:
        model = plan.shard(model)
    return TextEncoder(
        model,
        files.head,
        tokenizer,
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        includes_prompt=files.includes_prompt,
        max_length=limit_length(model, files.max_length, files.folder),
        similarity_name=files.similarity,
        lower_case=files.lower_case,
        plan=plan,
    )


def limit_length(model: nn.Transformer, max_length: int | None, folder: Path) -> int | None:
    """Return the number of tokens to which texts are cut: the folder's length, limited to the learned positions."""
    lengths = [stated_max_length(folder) if max_length is None else max_length, model.max_seq]
    return min((length for length in lengths if length is not None), default=None)


def load_text_tokenizer(call: str, folder: Path) -> data.FileTokenizer:
    """Load the tokenizer of a text encoder.

    If the folder names no end of text, the separator is taken as the end of text, or else the padding token, or else id
    0.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{call}: the folder has no tokenizer.json; put the model's tokenizer there.")
    check_truncation_side(folder)
    names = data.read_special_tokens(folder)
    end = next((names[name] for name in ("eos_token", "sep_token", "pad_token") if names.get(name)), None)
    return data.FileTokenizer(file, end_of_text=0 if end is None else end)
