"""Continuous batching of block diffusion: a `BlockEngine` denoises the next block of each request's row together."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ._blocks import check_block_model, make_rule
from ._decode import SamplingState
from ._denoise import BlockOrder, BlockRows, denoise_block, DenoisingRule, init_block_cache, read_whole_blocks
from ._model import count_cache_bytes, Model
from ._prompts import BUCKET, round_up
from ._request_engine import pad_ids, RequestEngine, Row
from ._requests import MAX_ENDS, Request, Result, RowSampling
from ._speculative import put_cache_row, put_row
from ._transforms import chain


class BlockEngine(RequestEngine):
    """Engine for models of block diffusion; each request gets the ids that `generate_blocks` would sample for it alone.

    A slot is the place of a row in the batch. A step denoises the next blocks of all slots together, until the
    slowest of these blocks is filled. A prompt is read in one piece as soon as a slot is free. The rule by which masked
    tokens are filled is the same for all requests; the settings of sampling are the request's own. Requests cannot ask
    for log-probabilities, `alternatives` or `allowed`, because the tokens of a block are filled in any order.
    """

    def __init__(
        self,
        model: Model,
        *,
        mask_id: int,
        steps: int | None = None,
        order: BlockOrder = "confidence",
        threshold: float = 1.0,
        slots: int = 8,
        capacity: int = 2048,
        cache_dtype: str | None = None,
    ):
        """Prepare an engine. Its caches never take more than `cache_bytes`.

        Raises a `ValueError` for numbers that are out of range and for a model that `generate_blocks` refuses.

        Args:
            model: A model of block diffusion.
            mask_id: The id of a masked token, as in `generate_blocks`.
            steps: Maximum number of passes that fill a block; None: the number of its tokens.
            order: The order in which tokens are filled.
            threshold: The probability above which a sampled token is filled at once.
            slots: Number of requests that are continued at once.
            capacity: Maximum number of ids of a row, prompt included. It is rounded up to complete blocks and
                to a multiple of 64, and lowered to complete blocks of the learned positions if the model has fewer.
            cache_dtype: The dtype of keys and values in the caches; None: the compute dtype.
        """
        for name, value in {"slots": slots, "capacity": capacity}.items():
            if value < 1:
                raise ValueError(f"BlockEngine({name}={value}): {name} must be at least 1.")
        block = check_block_model("BlockEngine", model)
        capacity = round_up(round_up(capacity, BUCKET), block)
        if model.max_seq is not None:
            capacity = min(capacity, model.max_seq // block * block)
        super().__init__(model, slots=slots, capacity=capacity)
        self._rule = make_rule("BlockEngine", model, block, mask_id, steps, order, threshold)
        self._cache_dtype = cache_dtype
        self._rows: dict[int, Row] = {}
        self._state: _BlockSlots = _free_slots(model, self._rule, slots, capacity, cache_dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches: of the slots, and of the prompt that is being read."""
        return count_cache_bytes(self.model, self.slots + 1, self.capacity, self._cache_dtype)

    def warm_up_requests(self) -> list[Request]:
        """Return requests that together run every program of the engine, so that each program is compiled."""
        # A prompt of one token more than a width is padded to the next width.
        lengths = [1, *(width + 1 for width in self._prompt_widths[:-1])]
        return [Request([0] * length, min(2, self.capacity - length)) for length in lengths if length < self.capacity]

    def delete_caches(self) -> None:
        """Free the memory of all caches for another engine, after an error that ends this engine."""
        for leaf in jax.tree.leaves(self._state):
            if isinstance(leaf, jax.Array):
                leaf.delete()

    @property
    def unsupported(self) -> Mapping[str, str]:
        """The reasons why the engine cannot honour `"allowed"` and `"log_probabilities"`."""
        reason = "a model of block diffusion fills the tokens of a block in any order"
        return {
            "allowed": f"{reason}, so its texts cannot be restricted",
            "log_probabilities": f"{reason}, so they have no log-probabilities",
        }

    def _started_rows(self) -> list[Row]:
        """Return the rows of all requests that have a slot."""
        return list(self._rows.values())

    def _advance(self) -> list[Result]:
        """Read the prompts of new requests, denoise a block of each slot, and return the results of all slots."""
        while len(self._rows) < self.slots and (waiting := self._next_request()) is not None:
            slot = min(set(range(self.slots)) - set(self._rows))
            self._rows[slot] = row = Row(*waiting, slot)
            self._start_row(row)
        if not self._rows:
            return []
        ended, known = np.ones(self.slots, bool), np.zeros(self.slots, np.int32)
        for slot, row in self._rows.items():
            ended[slot], known[slot] = bool(row.result.finish), row.result.prompt_length + len(row.result.ids)
        self._state, new = _denoise_slots((self.model, self._rule, jnp.asarray(ended), jnp.asarray(known)), self._state)
        new = jax.device_get(new)
        results = [self._append(row, new) for row in self._rows.values()]
        self._rows = {slot: row for slot, row in self._rows.items() if not row.result.finish}
        return results

    @property
    def _prompt_widths(self) -> list[int]:
        """Widths to which a prompt is padded: 64, 128, 256, ... up to `capacity`; each width has a compiled program."""
        widths, width = [], BUCKET
        while width < self.capacity:
            widths.append(width)
            width *= 2
        return [*widths, self.capacity]

    def _start_row(self, row: Row) -> None:
        """Read a request's prompt, and write its row into its slot."""
        request, prompt = row.request, np.asarray(row.request.prompt, np.int32)
        settings = RowSampling.for_request(request, request.bias([], self.model.vocab), len(prompt))
        end_ids = [*request.end_ids, *[-1] * (MAX_ENDS - len(request.end_ids))]
        sampling = SamplingState(
            chain(settings),
            jax.random.key(request.seed)[None],
            jnp.asarray([request.example], jnp.int32),
            jnp.asarray([end_ids], jnp.int32),
        )
        ids, lengths = pad_ids(prompt, self.capacity)
        limits, is_greedy = lengths + request.max_new_tokens, jnp.asarray([request.temperature == 0])
        new = _NewBlockRow(sampling, ids, lengths, limits, is_greedy, jnp.asarray(row.slot, jnp.int32))
        read = min(width for width in self._prompt_widths if width >= len(prompt))
        self._state = _start_slot((self.model, self._rule, new, read, self._cache_dtype), self._state)

    def _append(self, row: Row, new: "_NewBlockTokens") -> Result:
        """Append the new ids of a row to the row's result, up to the end of the text."""
        result, slot = row.result, row.slot
        if result.finish:
            return result
        if not (new.logits_are_numbers[slot] and new.has_candidates[slot]):
            row.end_with_error(has_numbers=bool(new.logits_are_numbers[slot]))
            return result
        count = int(new.lengths[slot]) - result.prompt_length - len(result.ids)
        for token in new.ids[slot, :count].tolist():
            result.ids.append(token)
            if row.request.ends is not None and row.call(row.request.ends, result.ids):
                result.finish = "stop"
            if result.finish:
                return result
        if new.done[slot]:
            result.finish = "end" if result.ids[-1] in row.request.end_ids else "length"
        return result


class _BlockSlots(eqx.Module):
    """Rows of an engine and the sampling state of each row; the row of a free slot is done."""

    rows: BlockRows
    sampling: SamplingState


class _NewBlockRow(NamedTuple):
    """A row whose prompt has not been read, and the slot that it gets."""

    sampling: SamplingState
    ids: Int[Array, "batch seq"]
    lengths: Int[Array, "batch"]
    """Number of ids of the prompt."""
    limits: Int[Array, "batch"]
    """The length at which the row ends at the latest."""
    is_greedy: Bool[Array, "batch"]
    slot: Int[Array, ""]


class _NewBlockTokens(NamedTuple):
    """Arrays that the host reads after a step: the new ids and the state of each row."""

    ids: Int[Array, "batch new"]
    """Ids that the host does not have yet; entries after the row's length are unused."""
    lengths: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    logits_are_numbers: Bool[Array, "batch"]
    has_candidates: Bool[Array, "batch"]


@eqx.filter_jit
def _free_slots(model: Model, rule: DenoisingRule, slots: int, capacity: int, dtype: str | None) -> _BlockSlots:
    """Return free slots for rows of up to `capacity` ids."""
    cache = init_block_cache(model, slots, capacity, dtype, rule.block)
    zeros, true = jnp.zeros(slots, jnp.int32), jnp.ones(slots, bool)
    rows = BlockRows(
        ids=jnp.zeros((slots, capacity), jnp.int32),
        starts=zeros,
        lengths=zeros,
        limits=zeros,
        done=true,
        is_greedy=true,
        logits_are_numbers=true,
        has_candidates=true,
        cache=cache,
    )
    keys, ends = jnp.broadcast_to(jax.random.key(0), (slots,)), jnp.full((slots, MAX_ENDS), -1, jnp.int32)
    return _BlockSlots(rows, SamplingState(chain(RowSampling.neutral(slots, model.vocab)), keys, zeros, ends))


@eqx.filter_jit(donate="all-except-first")
def _start_slot(fixed: tuple[Model, DenoisingRule, _NewBlockRow, int, str | None], slots: _BlockSlots) -> _BlockSlots:
    """Read the complete blocks of a prompt in one pass over `read` tokens, and write the row into its slot."""
    model, rule, new, read, dtype = fixed
    row = read_whole_blocks(
        model,
        new.ids,
        new.lengths,
        new.limits,
        rule,
        capacity=new.ids.shape[1],
        dtype=dtype,
        read=read,
        is_greedy=new.is_greedy,
    )
    # The cache may be sharded, so the model writes the row.
    cache = put_cache_row(model, slots.rows.cache, len(slots.rows.ids), new.slot, row.cache)
    without_caches = [dataclasses.replace(rows, cache=None) for rows in (slots.rows, row)]
    rows = dataclasses.replace(put_row(without_caches[0], new.slot, without_caches[1]), cache=cache)
    return _BlockSlots(rows, put_row(slots.sampling, new.slot, new.sampling))


@eqx.filter_jit(donate="all-except-first")
def _denoise_slots(
    fixed: tuple[Model, DenoisingRule, Bool[Array, "batch"], Int[Array, "batch"]], slots: _BlockSlots
) -> tuple[_BlockSlots, _NewBlockTokens]:
    """Denoise the next block of all rows that have not ended; the slots are donated.

    `fixed` has the model, its rule, the rows that the host has ended, and the number of each row's ids that the host
    has.
    """
    model, rule, ended, known = fixed
    rows = dataclasses.replace(slots.rows, done=slots.rows.done | ended)
    rows = denoise_block(model, rows, slots.sampling, rule)
    columns = jnp.minimum(known[:, None] + jnp.arange(rule.block, dtype=jnp.int32), rows.ids.shape[1] - 1)
    ids = jnp.take_along_axis(rows.ids, columns, axis=1)
    new = _NewBlockTokens(ids, rows.lengths, rows.done, rows.logits_are_numbers, rows.has_candidates)
    return _BlockSlots(rows, slots.sampling), new
