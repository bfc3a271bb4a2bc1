"""Rows of a fixed length from the tokens of a store, by index: the corpus is not copied."""

from bisect import bisect_left, insort

import numpy as np
from jaxtyping import Int

from .._shapes import Batch
from ._store import TokenStore


class Windows:
    """Row `i` is the `seq + 1` tokens from `i * seq` on, across borders of documents and without padding.

    Every token but the first is a target once; up to `seq` tokens at the very end are not used.
    """

    documents = None  # how many a row holds is not asked: each counts as one

    def __init__(self, store: TokenStore, *, seq: int):
        self.seq = seq
        self.rows = (len(store.tokens) - 1) // seq if seq > 0 else 0
        self.table_bytes = 0
        self._tokens = store.tokens
        if self.rows < 1:
            raise ValueError(
                f"Windows(store, seq={seq}): a row takes seq + 1 tokens and seq is at least 1, but {store.path.name} "
                f"has {len(store.tokens)} tokens; pass a seq from 1 to {len(store.tokens) - 1}, or more text."
            )

    def __call__(self, rows: Int[np.ndarray, "batch"]) -> Batch:
        """The rows with these numbers, without positions and segments: each row counts as one document."""
        steps = np.arange(self.seq + 1)
        taken = self._tokens[(rows * self.seq)[:, None] + steps].astype(np.int32)
        shape = (len(rows), self.seq)
        return Batch(
            ids=taken[:, :-1],
            targets=taken[:, 1:],
            weights=np.ones(shape, np.float32),
            examples=as_examples(rows),
        )


class Documents:
    """Rows of whole documents, each with its own segment number and its own positions from 0.

    A document longer than `seq` is cut into pieces of `seq` tokens and a remainder; positions restart in each piece,
    and the last token of a piece still has its true target, the first token of the next piece. The pieces are packed by
    best fit, longest first: each goes to the row with the least free space that can hold it. The last token of a
    document has no target, so its weight is 0. The rest of a row is padding: id 0, target 0, weight 0, position -1,
    segment -1.

    The index takes 13 bytes for each piece and 8 bytes for each row.
    """

    def __init__(self, store: TokenStore, *, seq: int):
        if seq < 2:
            raise ValueError(
                f"Documents(store, seq={seq}): a row must hold at least 2 tokens, a text's and the end of text; "
                f"pass a longer seq."
            )
        self.seq = seq
        self._tokens = store.tokens
        lengths = np.diff(store.offsets)
        # A remainder of just the end of text would have no target; `lengths - 1` leaves it out.
        pieces = -(-(lengths - 1) // seq)
        document = np.repeat(np.arange(len(lengths)), pieces)
        number = _ranges(pieces)
        starts = store.offsets[document] + number * seq
        sizes = np.minimum(store.offsets[document + 1] - starts, seq)
        row = best_fit(sizes, seq)
        order = np.argsort(row, kind="stable")
        self._starts = starts[order]
        self._sizes = sizes[order].astype(np.int32)
        self._ends = (starts + sizes == store.offsets[document + 1])[order]
        self._first = np.searchsorted(row[order], np.arange(row.max() + 2))
        self.rows = len(self._first) - 1
        self.documents = int(np.diff(self._first).max())  # the most of any row
        self.table_bytes = sum(part.nbytes for part in (self._starts, self._sizes, self._ends, self._first))

    def __call__(self, rows: Int[np.ndarray, "batch"]) -> Batch:
        """The rows with these numbers."""
        counts = self._first[rows + 1] - self._first[rows]
        segment = _ranges(counts)
        piece = np.repeat(self._first[rows], counts) + segment
        sizes = self._sizes[piece]
        # From here on, arrays have one entry for each token.
        position = _ranges(sizes)
        source = np.repeat(self._starts[piece], sizes) + position
        place = np.repeat(np.repeat(np.arange(len(rows)), counts), sizes), _ranges(_sums(sizes, counts))
        is_last = np.repeat(self._ends[piece], sizes) & (position == np.repeat(sizes, sizes) - 1)
        target = self._tokens[np.minimum(source + 1, len(self._tokens) - 1)]

        def laid_out(values: np.ndarray, empty: int, dtype: type) -> np.ndarray:
            array = np.full((len(rows), self.seq), empty, dtype)
            array[place] = values
            return array

        return Batch(
            ids=laid_out(self._tokens[source], 0, np.int32),
            targets=laid_out(np.where(is_last, 0, target), 0, np.int32),
            weights=laid_out(~is_last, 0, np.float32),
            positions=laid_out(position, -1, np.int32),
            segments=laid_out(np.repeat(segment, sizes), -1, np.int32),
            examples=as_examples(rows),
            documents=self.documents,
        )


def as_examples(numbers: Int[np.ndarray, "batch"]) -> Int[np.ndarray, "batch"]:
    """Row numbers modulo 2**31 as int32 (they are only used for random keys)."""
    return (numbers % 2**31).astype(np.int32)


def best_fit(sizes: Int[np.ndarray, "pieces"], capacity: int) -> Int[np.ndarray, "pieces"]:
    """The row of each piece, by best fit, longest first; rows are numbered in the order of their first pieces.

    Pieces of one size, and rows with one amount of free space, are handled together, so the time depends on the number
    of distinct sizes and not on the number of pieces.
    """
    row_of = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    distinct, first = np.unique(-sizes[order], return_index=True)
    rows_with: dict[int, list[np.ndarray]] = {}  # room left -> the rows that have it
    rooms: list[int] = []  # the keys, in order
    opened = 0

    def leave(room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if room not in rows_with:
                rows_with[room] = []
                insort(rooms, room)
            rows_with[room].append(rows)

    for size, members in zip((-distinct).tolist(), np.split(order, first[1:])):
        while len(members):
            least = bisect_left(rooms, size)
            room = rooms[least] if least < len(rooms) else capacity
            each = room // size
            wanted = -(-len(members) // each)
            if least < len(rooms):
                found = rows_with[room].pop()
                if not rows_with[room]:
                    del rows_with[room], rooms[least]
                rows = found[:wanted]
                leave(room, found[wanted:])
            else:
                rows = np.arange(opened, opened + wanted)
                opened += wanted
            taken, members = np.split(members, [len(rows) * each])
            row_of[taken] = np.repeat(rows, each)[: len(taken)]
            leave(room - each * size, rows[:-1])
            leave(room - (len(taken) - (len(rows) - 1) * each) * size, rows[-1:])
    _, first_piece, number = np.unique(row_of, return_index=True, return_inverse=True)
    rank = np.empty(len(first_piece), np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    return rank[number]


def _ranges(counts: Int[np.ndarray, "n"]) -> Int[np.ndarray, "total"]:
    """0 to count - 1 for each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _sums(values: Int[np.ndarray, "total"], counts: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The sums of consecutive groups of values; `counts` are the groups' sizes, all positive."""
    return np.add.reduceat(values, np.cumsum(counts) - counts).astype(np.int64)
