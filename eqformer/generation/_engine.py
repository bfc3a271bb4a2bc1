"""Continuous batching: an `Engine` continues requests that come and go in one batch with a fixed number of rows."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ._engine_programs import (
    Chunk,
    decode_slots,
    DecodeInputs,
    FlatTree,
    free_rows,
    init_cache,
    NewRow,
    NewTokens,
    read_chunk,
    read_encoder_prompt,
    start_row,
)
from ._model import count_cache_bytes, depends_on_length, Model
from ._prompts import BUCKET, PrefixCaches, round_up
from ._request_engine import pad_ids, RequestEngine, Row
from ._requests import MAX_ENDS, Request, Result, RowSampling
from ._speculative import add_draft


@dataclasses.dataclass
class _TokenRow(Row):
    """A request that has a row of the batch: its prompt is being read, or its text is being generated."""

    prompt: Int[np.ndarray, "tokens"]
    cache: FlatTree | None
    """The cache of the prompt that is being read; None after that."""
    read: int
    """Number of ids of the prompt that have been read."""
    keep_at: int = 0
    """Number of prompt ids after which a copy of the cache is stored, because an earlier prompt began with the same
    ids; 0: no copy."""


class Engine(RequestEngine):
    """Engine that continues requests as they arrive; each gets the ids that `generate` would sample for it alone.

    One compiled decoding step continues all rows of a batch, whose number is fixed. The place of a row in the batch is
    called a *slot*. A request waits until a slot is free, and its prompt is read in chunks between decoding steps. A
    prefix that a prompt shares with earlier prompts is not read again.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        capacity: int = 2048,
        prefill_chunk: int = 256,
        stride: int = 8,
        prefixes: int = 4,
        cache_dtype: str | None = None,
        draft: Model | str | None = None,
        draft_tokens: int = 4,
    ):
        """Prepare an engine. Its caches never take more than `cache_bytes`.

        Raises a `ValueError` for numbers below 1 and for a draft that does not fit the model.

        Args:
            model: The model, which must have a cache.
            slots: Number of slots, and so of requests that are continued at once.
            capacity: Maximum number of ids of a row, prompt included. It is rounded up to a multiple of 64, and lowered
                if the model has fewer learned positions.
            prefill_chunk: Number of prompt ids that are read at once, rounded up to a multiple of 64. Between two
                decoding steps, at most one chunk is read for each free slot. While other rows are being continued,
                reading also stops after four chunks that leave a prompt unfinished.
            stride: Maximum number of tokens of each row that are generated before the host reads them. A small stride
                streams more evenly; a large stride is faster. While a request waits for a slot, a step ends as soon as
                a row ends.
            prefixes: Number of prompt prefixes whose caches are stored for later prompts with the same beginning.
            cache_dtype: The dtype of keys and values in the caches; None: the compute dtype.
            draft: A smaller model that proposes tokens for `model` to check; `"mtp"` is the model's own predictor.
            draft_tokens: Tokens that the draft proposes at a time.
        """
        sizes = {"slots": slots, "capacity": capacity, "prefill_chunk": prefill_chunk, "stride": stride}
        for name, value in (sizes | {"prefixes": prefixes}).items():
            least = 0 if name == "prefixes" else 1
            if value < least:
                raise ValueError(f"Engine({name}={value}): {name} must be at least {least}.")
        self._cache_capacity = capacity = round_up(capacity, BUCKET)
        if model.max_seq is not None:
            self._cache_capacity = min(capacity, model.max_seq)
            # A decoder never reads the last token that is sampled, so that token needs no position. An encoder reads
            # the whole prompt.
            capacity = min(capacity, model.max_seq + (model.start is None))
        super().__init__(add_draft(model, draft, draft_tokens, capacity), slots=slots, capacity=capacity)
        self.stride, self.prefill_chunk = stride, round_up(min(prefill_chunk, capacity), BUCKET)
        self._has_draft = draft is not None
        self._flat_model = FlatTree(self.model)
        # A call of the decoding program runs at most `stride` steps, each of which appends at most `step_tokens` ids to
        # a row. A row's first id, which is sampled when the row starts, reaches the host with the first call, too.
        step_tokens = 1 if draft is None else draft_tokens + 1
        self._max_new = stride * step_tokens + 1
        self._cache_dtype = cache_dtype
        # Rows cannot share the cache of a prefix if rotary frequencies depend on the length of the whole row.
        can_share = model.start is None and not depends_on_length(model, capacity)
        self._prefixes = PrefixCaches(prefixes if can_share else 0, self.prefill_chunk)
        self._reading: _TokenRow | None = None
        self._rows: dict[int, _TokenRow] = {}
        self._biases = np.zeros((slots, model.vocab), np.float32)  # Added to the logits of each slot's next token.
        self._state: FlatTree = free_rows(self._flat_model, slots, capacity, self._cache_capacity, cache_dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches: of the slots, of the prompt that is being read, and of the stored prefixes."""
        count_bytes = lambda rows: count_cache_bytes(self.model, rows, self._cache_capacity, self._cache_dtype)
        return count_bytes(self.slots) + count_bytes(1) * (1 + self._prefixes.max_caches)

    @functools.cached_property
    def chunk_widths(self) -> tuple[int, ...]:
        """Widths to which a chunk of a prompt is padded: 32, 64, 128, ... up to `prefill_chunk`.

        Each width has a compiled program.
        """
        widths, width = [], _SMALLEST_CHUNK
        while width < self.prefill_chunk:
            widths.append(width)
            width *= 2
        return (*widths, self.prefill_chunk)

    def warm_up_requests(self) -> list[Request]:
        """Return requests that together run every program of the engine, so that each program is compiled."""
        # There is a program for each width to which prompts are padded. A prompt of one token is padded to the first
        # width, and a prompt of one token more than a width to the next width.
        lengths = [1, *(width + 1 for width in self.chunk_widths[:-1] if width < self.capacity - 2)]
        # The ids differ, because a prefix that is shared with an earlier prompt would not be read again.
        requests = [Request([number] * length, 2) for number, length in enumerate(lengths)]
        requests.append(Request([1], 2, temperature=1.0))
        if not self._has_draft:
            any_token = np.ones(self.model.vocab, bool)
            requests.append(Request([1], 2, allowed=lambda ids: any_token))
        return requests

    @property
    def unsupported(self) -> Mapping[str, str]:
        """The reason why an engine with a draft cannot honour `"allowed"`; empty without a draft."""
        if not self._has_draft:
            return {}
        return {"allowed": "a draft proposes several tokens at a time, so its texts cannot be restricted"}

    def _started_rows(self) -> list[Row]:
        """Return the rows of all requests that have a slot, the request whose prompt is being read first."""
        return [*([] if self._reading is None else [self._reading]), *self._rows.values()]

    def _advance(self) -> list[Result]:
        """Read parts of prompts, sample up to `stride` tokens for each slot, and return the results of all slots."""
        ended = self._drop_cancelled_prompt()
        self._read_prompts()
        return [*ended, *self._decode()]

    def _drop_cancelled_prompt(self) -> list[Result]:
        """Stop reading the prompt of a request that was cancelled; return the request's result."""
        if self._reading is None or not self._reading.result.finish:
            return []
        result, self._reading = self._reading.result, None
        return [result]

    def delete_caches(self) -> None:
        """Free the memory of all caches for another engine, after an error that ends this engine.

        Without this call, a reference to the engine, for example from a traceback, would keep the memory allocated.
        """
        prompt_cache = None if self._reading is None else self._reading.cache
        for leaf in jax.tree.leaves((self._state, prompt_cache, self._prefixes.caches())):
            if isinstance(leaf, jax.Array):
                leaf.delete()

    def _read_prompts(self) -> None:
        """Read a chunk of a prompt for each free slot, since a decoding step takes as long with free slots as without.

        If other rows wait for their next decoding step, reading stops after `_MAX_CHUNKS` chunks; the last chunk of a
        prompt does not count.
        """
        unfinished_chunks = 0
        for _ in range(self.slots - len(self._rows)):
            row = self._row_to_read()
            if row is None:
                return
            if self.model.start is None:
                hidden, initial = self._read_chunk(row), row.prompt
            else:
                hidden, initial = self._read_encoder_prompt(row), np.asarray([self.model.start], np.int32)
            if row.read == row.result.prompt_length:
                self._start_row(row, initial, hidden)
                self._rows[row.slot], self._reading = row, None
                continue
            unfinished_chunks += 1
            if self._rows and unfinished_chunks == _MAX_CHUNKS:
                return

    def _row_to_read(self) -> _TokenRow | None:
        """Return the row whose prompt is being read, or else a row for the next waiting request; None without one."""
        if self._reading is None and (waiting := self._next_request()) is not None:
            self._reading = self._begin_row(*waiting)
        return self._reading

    def _begin_row(self, request: Request, result: Result) -> _TokenRow:
        """Give a request a slot and the cache of the longest stored prefix of its prompt, or an empty cache."""
        slot = min(set(range(self.slots)) - set(self._rows))
        cache, result.shared_length, keep_at = self._prefixes.find(tuple(request.prompt))
        if cache is None:
            cache = init_cache(self._flat_model, 1, self._cache_capacity, self._cache_dtype)
        prompt = np.asarray(request.prompt, np.int32)
        return _TokenRow(request, result, slot, prompt, cache, result.shared_length, keep_at)

    def _read_chunk(self, row: _TokenRow) -> Float[jax.Array, "batch embed"]:
        """Read the next chunk of a prompt; return the hidden vector of its last id."""
        part = row.prompt[row.read : row.read + self.prefill_chunk]
        # The width of a chunk depends on the prompt alone, so that the same prompt always runs the same programs.
        ids, count = pad_ids(part, min(width for width in self.chunk_widths if width >= len(part)))
        start, length = (np.asarray([number], np.int32) for number in (row.read, len(row.prompt)))
        chunk = Chunk(self._flat_model, *jax.device_put((ids, start, count, length)))
        hidden, row.cache = read_chunk(chunk, row.cache)
        row.read += len(part)
        if row.read == row.keep_at:
            self._prefixes.keep(tuple(row.request.prompt[: row.read]), row.cache)
        return hidden

    def _read_encoder_prompt(self, row: _TokenRow) -> Float[jax.Array, "batch embed"]:
        """Read a whole prompt with the model's encoder; return the hidden vector of the start id."""
        source, length = pad_ids(row.prompt, self._cache_capacity)
        chunk = Chunk(self._flat_model, *jax.device_put((source, np.zeros_like(length), length, length)))
        hidden, row.cache = read_encoder_prompt(chunk, row.cache)
        row.read = len(row.prompt)
        return hidden

    def _start_row(
        self, row: _TokenRow, initial: Int[np.ndarray, "tokens"], hidden: Float[jax.Array, "batch embed"]
    ) -> None:
        """Sample a request's first token after the initial ids of its row, and write the row into its slot."""
        request = row.request
        end_ids = [*request.end_ids, *[-1] * (MAX_ENDS - len(request.end_ids))]
        self._biases[row.slot] = bias = self._bias(row)
        ids, length = pad_ids(initial, self.capacity)
        assert row.cache is not None
        numbers = (  # All numbers go to the device in one transfer.
            np.asarray(request.seed, np.int32),
            np.asarray([request.example], np.int32),
            np.asarray([end_ids], np.int32),
            ids,
            length,
            length + np.int32(request.max_new_tokens),
            np.asarray(row.slot, np.int32),
            np.asarray([request.alternatives > 0]),
        )
        settings = RowSampling.for_request(request, bias, len(initial))
        new = NewRow(self._flat_model, settings, hidden, row.cache, *jax.device_put(numbers))
        self._state = start_row(new, self._state)
        row.cache = None

    def _decode(self) -> list[Result]:
        """Sample tokens for the slots, and return the results of all rows; rows that have ended leave their slots."""
        if not self._rows:
            return []
        masked = [row for row in self._rows.values() if row.request.allowed is not None and not row.result.finish]
        count, bias = self.stride, None
        if masked:
            # The mask of a row's second token depends on its first token, which the host does not have right after the
            # row starts. The first step of such a row therefore samples no token. It passes biases, although they are
            # unused, so that it runs the same program as later steps.
            have_ids = all(row.result.ids for row in masked)
            count = 1 if have_ids else 0
            bias = self._mask_next_tokens(masked if have_ids else ())
        ended = np.ones(self.slots, bool)
        known = np.zeros(self.slots, np.int32)
        for slot, row in self._rows.items():
            ended[slot], known[slot] = bool(row.result.finish), self._known_length(row)
        has_waiting = next(self._waiting_results(), None) is not None
        numbers = (ended, known, np.asarray(count, np.int32), np.asarray(has_waiting))
        inputs = DecodeInputs(self._flat_model, *jax.device_put(numbers), bias=bias)
        is_greedy = all(row.request.is_greedy for row in self._rows.values())
        self._state, progress = decode_slots(inputs, self._state, self._max_new, is_greedy)
        progress = jax.device_get(progress)
        results = [self._append(row, progress) for row in self._rows.values()]
        self._rows = {slot: row for slot, row in self._rows.items() if not row.result.finish}
        return results

    def _known_length(self, row: _TokenRow) -> int:
        """Return how many ids of a row the host has: the ids before the first new token, and the ids of the result."""
        return (row.result.prompt_length if self.model.start is None else 1) + len(row.result.ids)

    def _append(self, row: _TokenRow, progress: NewTokens) -> Result:
        """Append the new ids of a row to the row's result, up to the end of the text."""
        result, slot = row.result, row.slot
        if result.finish:
            return result
        can_go_on = bool(progress.logits_are_numbers[slot] and progress.has_candidates[slot])
        # If a row cannot go on, its last id is a placeholder, which was not sampled.
        new = int(progress.lengths[slot]) - self._known_length(row) - (0 if can_go_on else 1)
        likely = row.request.alternatives
        tables = (
            progress.ids[slot, :new],
            progress.log_probabilities[slot, :new],
            progress.alternative_ids[slot, :new, :likely],
            progress.alternative_log_probabilities[slot, :new, :likely],
        )
        for token, log_probability, likely_ids, likely_values in zip(*(table.tolist() for table in tables)):
            result.ids.append(token)
            result.log_probabilities.append(log_probability)
            result.alternatives.append(tuple(zip(likely_ids, likely_values)))
            if row.request.ends is not None and row.call(row.request.ends, result.ids):
                result.finish = "stop"
            if result.finish:
                return result
        if not can_go_on:
            row.end_with_error(has_numbers=bool(progress.logits_are_numbers[slot]))
        elif progress.done[slot]:
            result.finish = "end" if result.ids[-1] in row.request.end_ids else "length"
        return result

    def _mask_next_tokens(self, rows: Iterable[_TokenRow]) -> Float[jax.Array, "batch vocab"]:
        """Return the bias of each slot's next token, after updating the masks of these rows."""
        for row in rows:
            self._biases[row.slot] = self._bias(row)
        return jnp.array(self._biases)  # A copy, since later steps write into the biases.

    def _bias(self, row: _TokenRow) -> Float[np.ndarray, "vocab"]:
        """Return the bias of a row's next token; zeros if the request's function fails."""
        vocab = self.model.vocab
        bias = row.call(row.request.bias, row.result.ids, vocab)
        return np.zeros(vocab, np.float32) if bias is None else bias


_SMALLEST_CHUNK = 32
"""Smallest width of a chunk: a prompt of up to 32 ids takes 0.6 of the time of 64 ids (8 M parameters on a CPU)."""
_MAX_CHUNKS = 4
"""Maximum number of chunks that leave a prompt unfinished, between two decoding steps of other rows."""
