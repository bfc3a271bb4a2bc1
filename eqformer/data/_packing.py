"""Rows of a fixed length: windows and packed documents of a token store, and pairs of texts."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from .._shapes import Batch
from ._token_store import TokenStore


class WindowPacking:
    """Rows of consecutive tokens, across document boundaries and without padding: row `i` starts at token `i * seq`.

    A row is `seq + 1` tokens, and shares its last token with the next row. Every token except the store's first token
    is a target once; up to `seq` tokens at the end of the store are not used.
    """

    documents = None  # Rows have no document boundaries, so the maximum number of documents of a row is not given.
    group = 1
    cut_note = ""

    def __init__(self, store: TokenStore, *, seq: int):
        self.seq = seq
        self.rows = (len(store.tokens) - 1) // seq if seq > 0 else 0
        self.table_bytes = 0
        self._tokens = store.tokens
        if store.weights is not None:
            raise ValueError(
                f"WindowPacking(store, seq={seq}): windows would mix conversations; use packing='documents'."
            )
        if self.rows < 1:
            raise ValueError(
                f"WindowPacking(store, seq={seq}): a row takes seq + 1 tokens and seq is at least 1, but "
                f"{store.path.name} has {len(store.tokens)} tokens; pass a seq from 1 to {len(store.tokens) - 1}, or "
                f"more text."
            )

    def __call__(self, rows: Int[np.ndarray, "batch"]) -> Batch:
        """Return the rows with these indices, without positions and segments: attention ignores document boundaries."""
        steps = np.arange(self.seq + 1)
        tokens = self._tokens[(rows * self.seq)[:, None] + steps].astype(np.int32)
        shape = (len(rows), self.seq)
        return Batch(
            ids=tokens[:, :-1],
            targets=tokens[:, 1:],
            weights=np.ones(shape, np.float32),
            examples=as_examples(rows),
        )


class DocumentPacking:
    """Rows of complete documents, each with a segment number and with positions from 0.

    A document longer than `seq` is cut into pieces of `seq` tokens and a remainder; positions restart in each piece,
    and the last token of a piece still has its true target, the first token of the next piece. The pieces are packed by
    best fit, longest first: each piece goes to the row with the least free space that is large enough. The last token
    of a document has no target, so its weight is 0. The free space of a row is padding: id 0, target 0, weight 0,
    position -1, segment -1.

    A conversation is never continued in another row: if it is longer than `seq`, it is cut at the end of the last reply
    that fits. `cut` is the number of such conversations. A conversation is left out if no trained reply fits; `skipped`
    is the number of conversations that are left out. The weights of targets are the weights in the store.

    The index takes 13 bytes for each piece and 8 bytes for each row.
    """

    group = 1

    def __init__(self, store: TokenStore, *, seq: int):
        if seq < 2:
            raise ValueError(
                f"DocumentPacking(store, seq={seq}): a row must have at least 2 tokens, one of text and the end "
                f"of text; pass a longer seq."
            )
        self.seq = seq
        self._tokens, self._weights = store.tokens, store.weights
        self.cut = self.skipped = 0
        if store.weights is None or store.cuts is None:
            starts, sizes, is_end = _split_documents(store.offsets, seq)
        else:
            starts, sizes = _cut_conversations(store.offsets, store.weights, store.cuts, seq)
            is_end = np.ones(len(starts), bool)
            self.cut = int(np.sum(sizes < np.diff(store.offsets)[np.isin(store.offsets[:-1], starts)]))
            self.skipped = store.documents - len(starts)
            if not len(starts):
                raise ValueError(
                    f"DocumentPacking(store, seq={seq}): no conversation of {store.path.name} has a reply that ends "
                    "within a row; pass a longer seq."
                )
        row = pack_best_fit(sizes, seq)
        order = np.argsort(row, kind="stable")
        self._starts = starts[order]
        self._sizes = sizes[order].astype(np.int32)
        self._ends = is_end[order]
        self._first = np.searchsorted(row[order], np.arange(row.max() + 2))
        self.rows = len(self._first) - 1
        self.documents = int(np.diff(self._first).max())  # the maximum number of documents in a row
        self.table_bytes = sum(array.nbytes for array in (self._starts, self._sizes, self._ends, self._first))

    @property
    def cut_note(self) -> str:
        """Text that says how many conversations do not fit into a row; empty if all fit."""
        if not self.cut + self.skipped:
            return ""
        return (
            f"{self.cut} conversations are cut at the end of a reply, and {self.skipped} are left out, because none of "
            "their replies ends within a row"
        )

    def __call__(self, rows: Int[np.ndarray, "batch"]) -> Batch:
        """Return the rows with these indices."""
        # Arrays with one entry per piece: the index of the piece in its row, in the table, and its number of tokens.
        counts = self._first[rows + 1] - self._first[rows]
        segment = _concatenate_ranges(counts)
        piece = np.repeat(self._first[rows], counts) + segment
        sizes = self._sizes[piece]
        # Arrays with one entry per token: its position in the piece, its index in the store, and its place in the
        # batch.
        position = _concatenate_ranges(sizes)
        source = np.repeat(self._starts[piece], sizes) + position
        row = np.repeat(np.repeat(np.arange(len(rows)), counts), sizes)
        column = _concatenate_ranges(_sum_groups(sizes, counts))
        is_last = np.repeat(self._ends[piece], sizes) & (position == np.repeat(sizes, sizes) - 1)
        next_token = np.minimum(source + 1, len(self._tokens) - 1)
        weights = ~is_last if self._weights is None else np.where(is_last, 0, self._weights[next_token])

        def fill_rows(values: np.ndarray, padding: int, dtype: type) -> np.ndarray:
            array = np.full((len(rows), self.seq), padding, dtype)
            array[row, column] = values
            return array

        return Batch(
            ids=fill_rows(self._tokens[source], 0, np.int32),
            targets=fill_rows(np.where(is_last, 0, self._tokens[next_token]), 0, np.int32),
            weights=fill_rows(weights, 0, np.float32),
            positions=fill_rows(position, -1, np.int32),
            segments=fill_rows(np.repeat(segment, sizes), -1, np.int32),
            examples=as_examples(rows),
            documents=self.documents,
        )


def _split_documents(
    offsets: Int[np.ndarray, "borders"], seq: int
) -> tuple[Int[np.ndarray, "pieces"], Int[np.ndarray, "pieces"], Bool[np.ndarray, "pieces"]]:
    """Return each piece's first token, its size (at most `seq` tokens), and whether it is the end of its document."""
    lengths = np.diff(offsets)
    # `lengths - 1` excludes a remainder of only the end of text, which would have no target.
    pieces = -(-(lengths - 1) // seq)
    document = np.repeat(np.arange(len(lengths)), pieces)
    starts = offsets[document] + _concatenate_ranges(pieces) * seq
    sizes = np.minimum(offsets[document + 1] - starts, seq)
    return starts, sizes, starts + sizes == offsets[document + 1]


def _cut_conversations(
    offsets: Int[np.ndarray, "borders"],
    weights: Float[np.ndarray, "tokens"],
    cuts: Int[np.ndarray, "cuts"],
    seq: int,
) -> tuple[Int[np.ndarray, "pieces"], Int[np.ndarray, "pieces"]]:
    """Return the first token and the size of each conversation, cut to `seq` tokens at the end of a reply.

    Conversations without a trained token before the cut are left out.
    """
    starts, stops = offsets[:-1], offsets[1:]
    last_cut = np.searchsorted(cuts, np.minimum(stops, starts + seq), "right") - 1
    cut_stops = np.where(last_cut >= 0, cuts[last_cut], 0)
    stops = np.where(stops - starts <= seq, stops, cut_stops)
    is_trained = have_targets(weights, starts, stops)
    return starts[is_trained], (stops - starts)[is_trained]


def have_targets(
    weights: Float[np.ndarray, "tokens"], starts: Int[np.ndarray, "pieces"], stops: Int[np.ndarray, "pieces"]
) -> Bool[np.ndarray, "pieces"]:
    """Return whether each piece, tokens `start` to `stop - 1`, has a trained target after its first token."""
    # `reduceat` takes no bound beyond the array, and a piece may stop after the last token, so a token is appended.
    bounds = np.stack([np.minimum(starts + 1, len(weights)), stops], axis=1).ravel()
    has_weight = np.logical_or.reduceat(np.append(weights > 0, False), bounds)[::2]
    return (stops > starts + 1) & has_weight


def as_examples(numbers: Int[np.ndarray, "batch"]) -> Int[np.ndarray, "batch"]:
    """Return row indices modulo 2**31 as int32; that is enough, because `Batch.examples` only decides random keys."""
    return (numbers % 2**31).astype(np.int32)


def list_rows(groups: Int[np.ndarray, "groups"], group: int) -> Int[np.ndarray, "batch"]:
    """Return the indices of the rows of these groups of `group` rows."""
    return (groups[:, None] * group + np.arange(group)).ravel()


def pack_best_fit(sizes: Int[np.ndarray, "pieces"], capacity: int) -> Int[np.ndarray, "pieces"]:
    """Return the row of each piece, by best fit, longest first; rows are numbered in the order of their first pieces.

    Pieces of the same size are placed together, and rows with the same free space are filled together. The time
    therefore depends on the number of distinct sizes, and not on the number of pieces.
    """
    row_of = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    distinct, first = np.unique(-sizes[order], return_index=True)
    rows_with_space: dict[int, list[np.ndarray]] = {}  # free space -> arrays of rows with this free space
    spaces: list[int] = []  # the keys of `rows_with_space` in ascending order
    row_count = 0

    def record_space(space: int, rows: np.ndarray) -> None:
        if space and len(rows):
            if space not in rows_with_space:
                rows_with_space[space] = []
                insort(spaces, space)
            rows_with_space[space].append(rows)

    for size, members in zip((-distinct).tolist(), np.split(order, first[1:])):
        while len(members):
            smallest = bisect_left(spaces, size)
            space = spaces[smallest] if smallest < len(spaces) else capacity
            pieces_per_row = space // size
            needed_rows = -(-len(members) // pieces_per_row)
            if smallest < len(spaces):
                candidates = rows_with_space[space].pop()
                if not rows_with_space[space]:
                    del rows_with_space[space], spaces[smallest]
                rows = candidates[:needed_rows]
                record_space(space, candidates[needed_rows:])
            else:
                rows = np.arange(row_count, row_count + needed_rows)
                row_count += needed_rows
            packed, members = np.split(members, [len(rows) * pieces_per_row])
            row_of[packed] = np.repeat(rows, pieces_per_row)[: len(packed)]
            record_space(space - pieces_per_row * size, rows[:-1])
            record_space(space - (len(packed) - (len(rows) - 1) * pieces_per_row) * size, rows[-1:])
    _, first_piece, number = np.unique(row_of, return_index=True, return_inverse=True)
    rank = np.empty(len(first_piece), np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    return rank[number]


def _concatenate_ranges(counts: Int[np.ndarray, "n"]) -> Int[np.ndarray, "total"]:
    """Return 0 to count - 1 for each count, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _sum_groups(values: Int[np.ndarray, "total"], counts: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Sum consecutive groups of values; `counts` are the groups' sizes, all positive."""
    return np.add.reduceat(values, np.cumsum(counts) - counts).astype(np.int64)


Ids = Sequence[int] | Int[np.ndarray, "_"]


def batch_pairs(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    *,
    start: int,
    seq: int,
    source_seq: int,
    first_example: int = 0,
) -> Batch:
    """Return a batch for encoder-decoder models: the encoder reads `sources`, and the decoder predicts `targets`.

    The decoder's ids in a row are `start` and the target without its last id. Put the end of text at the end of each
    target if the model is to learn to end. Padding has weight 0, and position -1 in the source. Raises a `ValueError`
    for a text that is empty or too long.

    Args:
        sources: The ids that the encoder reads, one text per row.
        targets: The ids that the decoder predicts, one text per row.
        start: The decoder's first id, `model.start`.
        seq: The number of tokens in a row of targets.
        source_seq: The number of tokens in a row of sources.
        first_example: The index of the first row among all rows of the run, which decides the row's random keys.
    """
    if len(sources) != len(targets) or not sources:
        raise ValueError(f"batch_pairs: {len(sources)} sources and {len(targets)} targets; each source needs a target.")
    for name, texts, max_length in (("sources", sources, source_seq), ("targets", targets, seq)):
        for number, text in enumerate(texts):
            if not 1 <= len(text) <= max_length:
                raise ValueError(
                    f"batch_pairs({name}): text {number} has {len(text)} ids, and a row holds 1 to {max_length}; cut "
                    f"the text, or give a larger {'source_seq' if name == 'sources' else 'seq'}."
                )
    rows, positions = len(targets), np.arange(source_seq, dtype=np.int32)
    source_ids = np.stack([_pad_ids(text, source_seq) for text in sources])
    target_ids = np.stack([_pad_ids(text, seq) for text in targets])
    lengths = np.array([[len(text)] for text in sources])
    return Batch(
        ids=np.concatenate([np.full((rows, 1), start, np.int32), target_ids[:, :-1]], axis=1),
        targets=target_ids,
        weights=np.stack([np.arange(seq) < len(text) for text in targets]).astype(np.float32),
        examples=np.arange(first_example, first_example + rows, dtype=np.int32),
        source_ids=source_ids,
        source_positions=np.where(positions < lengths, positions, -1).astype(np.int32),
    )


def _pad_ids(text: Ids, length: int) -> Int[np.ndarray, "_"]:
    return np.pad(np.asarray(text, np.int32), (0, length - len(text)))
