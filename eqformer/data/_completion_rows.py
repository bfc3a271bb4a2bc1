"""Rows of a prompt and a completion: pairs or labelled rows from a token store, and batches of examples in memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from .._shapes import PolicyBatch, PreferenceBatch
from ._conversations import EncodedExample
from ._packing import as_examples, have_targets, list_rows
from ._token_store import TokenStore


class PairPacking:
    """Pairs of rows: the chosen and the rejected completion of a prompt, from a store of `preferences`.

    A row is one document, which is cut after `seq + 1` tokens; `cut` is the number of documents that are cut, and
    `cut_note` describes this number in words. Padding is as in `DocumentPacking`. Raises a `ValueError` for a store of
    other documents, and for a prompt so long that no token of its completion fits into the row.
    """

    documents = 1
    group = 2

    def __init__(self, store: TokenStore, *, seq: int):
        call = f"PairPacking(store, seq={seq})"
        if store.weights is None or store.documents % 2:
            raise ValueError(
                f"{call}: the store must hold pairs of preferences, but {store.path.name} has other text; make the "
                "store from data.preferences(path) with a ConversationEncoder."
            )
        self.seq, self.rows, self.table_bytes = seq, store.documents // 2, 0
        self._tokens, self._weights, self._offsets = store.tokens, store.weights, store.offsets
        starts, stops = store.offsets[:-1], store.offsets[1:]
        self.cut = int(np.sum(stops - starts > seq + 1))
        self.cut_note = _note_cut_completions(self.cut)
        has_target = have_targets(store.weights, starts, np.minimum(stops, starts + seq + 1))
        if not has_target.all():
            document = int(np.argmin(has_target))
            raise ValueError(
                f"{call}: the prompt must leave room for its completion in a row, but the prompt of "
                f"{store.name_document(document)} leaves no room for the {('chosen', 'rejected')[document % 2]} "
                "completion; pass a longer seq, or leave the row out."
            )

    def __call__(self, rows: Int[np.ndarray, "pairs"]) -> PreferenceBatch:
        """Return the pairs with these indices, each as its chosen and then its rejected row."""
        documents = list_rows(rows, self.group)
        spans = [slice(*self._offsets[document : document + 2]) for document in documents]
        examples = [(self._tokens[span], self._weights[span]) for span in spans]
        return PreferenceBatch(**_fill_rows(examples, self.seq), examples=as_examples(documents), group=2)


class LabelledPacking:
    """Rows of labelled completions, from a store of `labelled` rows, for KTO.

    A row is one document, which is cut after `seq + 1` tokens; `cut` is the number of documents that are cut, and
    `cut_note` describes this number in words. Padding is as in `DocumentPacking`. The `mismatched` rows of a batch
    combine each row's prompt with the completion of the previous row in the file (the first row takes the last row's
    completion). KTO's reference point is the mean log-ratio of the mismatched rows. Raises a `ValueError` for a store
    of other documents, and for a prompt so long that no token of its completion fits into the row.
    """

    documents = 1
    group = 1

    def __init__(self, store: TokenStore, *, seq: int):
        call = f"LabelledPacking(store, seq={seq})"
        if store.weights is None or store.labels is None or np.any(store.labels < 0) or store.documents < 2:
            raise ValueError(
                f"{call}: the store must hold at least two labelled rows, but {store.path.name} has other text; make "
                "the store from data.labelled(path) with a ConversationEncoder."
            )
        self.seq, self.rows, self.table_bytes = seq, store.documents, 0
        self._tokens, self._weights, self._labels = store.tokens, store.weights, store.labels
        self._offsets = store.offsets
        self.cut = int(np.sum(np.diff(store.offsets) > seq + 1))
        self.cut_note = _note_cut_completions(self.cut)
        spans = zip(store.offsets[:-1], store.offsets[1:], strict=True)
        # In a row without a prompt, the first token counts as the prompt, because no token predicts it.
        self._prompts = np.array([max(int(np.argmax(self._weights[a:b] > 0)), 1) for a, b in spans])
        longest = int(np.argmax(self._prompts))
        if self._prompts[longest] > seq:
            raise ValueError(
                f"{call}: the prompt must leave room for its completion in a row, but the prompt of "
                f"{store.name_document(longest)} has {self._prompts[longest]} tokens; pass a longer seq, or leave the "
                "row out."
            )

    def __call__(self, rows: Int[np.ndarray, "batch"]) -> PreferenceBatch:
        """Return the rows with these indices."""
        numbers, labels = as_examples(rows), self._labels[rows].astype(np.float32)
        mismatched = PreferenceBatch(**self._fill(rows, (rows - 1) % self.rows), examples=numbers)
        return PreferenceBatch(**self._fill(rows, rows), examples=numbers, labels=labels, mismatched=mismatched)

    def _fill(self, prompts: Int[np.ndarray, "batch"], completions: Int[np.ndarray, "batch"]) -> dict[str, Any]:
        """Return the arrays of a batch that joins the prompts of some rows with the completions of other rows."""
        pairs = zip(prompts.tolist(), completions.tolist(), strict=True)
        examples = [_join(self._prompt(prompt), self._completion(completion)) for prompt, completion in pairs]
        return _fill_rows(examples, self.seq)

    def _prompt(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the weights of a prompt."""
        span = slice(self._offsets[row], self._offsets[row] + self._prompts[row])
        return self._tokens[span], np.zeros(self._prompts[row], np.float32)

    def _completion(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the weights of a completion."""
        span = slice(self._offsets[row] + self._prompts[row], self._offsets[row + 1])
        return self._tokens[span], self._weights[span]


def _note_cut_completions(cut: int) -> str:
    """Return a text that says how many completions do not fit into a row; empty if all fit."""
    return f"{cut} completions are cut at the end of a row" if cut else ""


def _join(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Join ids and weights of the parts of a document."""
    ids, weights = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(weights)


def batch_preferences(
    pairs: Sequence[tuple[EncodedExample, EncodedExample]], *, seq: int, first_example: int = 0
) -> PreferenceBatch:
    """Return a batch of pairs, each as its chosen and then its rejected row, for a `training.preference_loss`.

    Raises a `ValueError` for a prompt so long that no token of its completion fits into the row, and for equal
    completions.

    Args:
        pairs: The chosen and the rejected example of each prompt, from a `ConversationEncoder`.
        seq: The number of tokens in a row; a longer completion is cut.
        first_example: The index of the first row among all rows of the run, which decides the row's random keys.
    """
    for index, (chosen, rejected) in enumerate(pairs):
        if np.array_equal(chosen.ids, rejected.ids):
            raise ValueError(
                f"batch_preferences(pairs): both completions of pair {index} have the same tokens; leave the pair out."
            )
    rows = [example for pair in pairs for example in pair]
    return _fill_examples(f"batch_preferences(pairs, seq={seq})", "pair", 2, rows, seq, first_example)


def batch_labelled(
    examples: Sequence[EncodedExample], labels: Sequence[bool], *, seq: int, first_example: int = 0
) -> PreferenceBatch:
    """Return a batch of completions that are labelled desirable or undesirable, for KTO.

    Raises a `ValueError` for a prompt so long that no token of its completion fits into the row, and if the numbers of
    examples and labels differ.

    Args:
        examples: The examples, from a `ConversationEncoder`.
        labels: Whether each completion is desirable.
        seq: The tokens of a row; a longer completion is cut.
        first_example: The index of the first row among all rows of the run, which decides the row's random keys.
    """
    if len(examples) != len(labels):
        raise ValueError(
            f"batch_labelled(examples, labels): {len(examples)} examples and {len(labels)} labels; each example needs "
            "one label."
        )
    call = f"batch_labelled(examples, labels, seq={seq})"
    batch = _fill_examples(call, "example", 1, examples, seq, first_example)
    return replace(batch, labels=np.asarray(labels, np.float32))


def _fill_examples(
    call: str, kind: str, group: int, examples: Sequence[EncodedExample], seq: int, first_example: int
) -> PreferenceBatch:
    for index, example in enumerate(examples):
        if not np.any(example.weights[1 : seq + 1] > 0):
            raise ValueError(
                f"{call}: the prompt must leave room for its completion in a row, but the prompt of {kind} "
                f"{index // group} has {int(np.argmax(example.weights > 0))} tokens; pass a longer seq, or leave the "
                "row out."
            )
    row_indices = as_examples(np.arange(first_example, first_example + len(examples)))
    rows = _fill_rows([(example.ids, example.weights) for example in examples], seq)
    return PreferenceBatch(**rows, examples=row_indices, group=group)


def batch_completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    seq: int,
    first_example: int = 0,
    temperature: float = 1.0,
) -> PolicyBatch:
    """Return a batch of prompts with their sampled completions, for a `training.policy_loss`.

    The targets of the completions have weight 1. Raises a `ValueError` for a row of more than `seq + 1` ids, and for a
    prompt or a completion without ids.

    Args:
        prompts: The ids of each prompt.
        completions: The ids of each completion, with the end of text if it was sampled.
        seq: The tokens of a row.
        first_example: The index of the first row among all rows of the run, which decides the row's random keys.
        temperature: The temperature of sampling.
    """
    pairs = list(zip(prompts, completions, strict=True))
    for index, (prompt, completion) in enumerate(pairs):
        if not len(prompt) or not len(completion) or len(prompt) + len(completion) > seq + 1:
            raise ValueError(
                f"batch_completions(prompts, completions, seq={seq}): row {index} has a prompt of {len(prompt)} ids "
                f"and a completion of {len(completion)}; each must have at least 1 id, and both together at most "
                "seq + 1; pass a longer seq."
            )
    rows = [
        (np.asarray([*prompt, *completion], np.int32), np.repeat([0.0, 1.0], [len(prompt), len(completion)]))
        for prompt, completion in pairs
    ]
    row_indices = as_examples(np.arange(first_example, first_example + len(rows)))
    return PolicyBatch(**_fill_rows(rows, seq), examples=row_indices, temperature=temperature)


def _fill_rows(examples: Sequence[tuple[np.ndarray, np.ndarray]], seq: int) -> dict[str, Any]:
    """Return the arrays of a batch in which each row is one document (its ids and its weights) and padding."""
    ids, targets = np.zeros((2, len(examples), seq), np.int32)
    weights, positions = np.zeros(ids.shape, np.float32), np.full(ids.shape, -1, np.int32)
    for row, (tokens, token_weights) in enumerate(examples):
        length = min(len(tokens) - 1, seq)
        ids[row, :length], targets[row, :length] = tokens[:length], tokens[1 : length + 1]
        weights[row, :length], positions[row, :length] = token_weights[1 : length + 1], np.arange(length)
    segments = np.where(positions < 0, -1, 0).astype(np.int32)
    arrays = {"ids": ids, "targets": targets, "weights": weights, "positions": positions, "segments": segments}
    return arrays | {"documents": 1}
