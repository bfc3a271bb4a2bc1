"""`RequestEngine`: the queue of requests that come and go, and the loop over steps that continue them."""

import abc
import asyncio
import collections
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ._model import Model
from ._prompts import check_ids
from ._requests import Request, Result


T = TypeVar("T")


@dataclasses.dataclass
class Row:
    """A request that has a slot."""

    request: Request
    result: Result
    slot: int

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of the request; if the function fails, end this request alone, and return None."""
        try:
            return function(*arguments)
        except Exception as error:
            self.result.finish = "error"
            self.result.error = f"Engine: a function of the request raised {type(error).__name__}: {error}"
            return None

    def end_with_error(self, *, has_numbers: bool) -> None:
        """End a request that cannot go on.

        Its logits are NaN or, if `has_numbers` is true, its settings leave no token to sample.
        """
        fault = "its settings left no token to sample" if has_numbers else "its logits are NaN"
        self.result.finish, self.result.error = "error", f"Engine: the request cannot go on, because {fault}."


class RequestEngine(abc.ABC):
    """Engine that continues requests as they arrive, up to `slots` requests at once.

    `Engine` continues texts token by token, and `BlockEngine` block by block. The requests are rows of one batch. The
    place of a row in the batch is called a *slot*, and a request waits until a slot is free. A request's ids do not
    depend on other requests, on the slot or on the time of arrival. `submit` and `cancel` may be called from any
    thread. Only one thread at a time may call `step` or `run`.
    """

    model: Model
    slots: int
    """Number of requests that are continued at once."""
    capacity: int
    """Maximum number of ids of a row, prompt included."""

    def __init__(self, model: Model, *, slots: int, capacity: int):
        """Prepare an empty queue."""
        self.model, self.slots, self.capacity = model, slots, capacity
        self._numbers = itertools.count()
        self._waiting: collections.deque[tuple[Request, Result]] = collections.deque()
        self._cancelled: collections.deque[int] = collections.deque()
        self._stream_queues: dict[int, asyncio.Queue[Result | Exception]] = {}
        self._stream_task: asyncio.Task[None] | None = None

    @property
    @abc.abstractmethod
    def cache_bytes(self) -> int:
        """Bytes of all caches, which do not grow."""

    @abc.abstractmethod
    def warm_up_requests(self) -> list[Request]:
        """Return requests that together run every program of the engine, so that each program is compiled."""

    @property
    @abc.abstractmethod
    def unsupported(self) -> Mapping[str, str]:
        """The reasons why the engine cannot honour `"allowed"` or `"log_probabilities"`; empty if it honours both."""

    @abc.abstractmethod
    def _started_rows(self) -> list[Row]:
        """Return the rows of all requests that have a slot."""

    @abc.abstractmethod
    def _advance(self) -> list[Result]:
        """Give waiting requests their slots, continue all slots, and return the results of all slots.

        A cancelled request has a `finish` in its result already, and is not continued.
        """

    @abc.abstractmethod
    def delete_caches(self) -> None:
        """Free the memory of all caches for another engine, after an error that ends this engine.

        Without this call, a reference to the engine, for example from a traceback, would keep the memory allocated.
        """

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is being continued."""
        return not (self._waiting or self._started_rows())

    def check(self, request: Request) -> None:
        """Raise a `ValueError` for a request that `submit` refuses.

        `submit` refuses a prompt that is empty; unknown ids in the prompt, in `end_of_text` or in `logit_bias`; a
        `seed` or `example` that is negative or does not fit into 31 bits; `allowed` and `alternatives` if they are
        `unsupported`; and a request that is longer than the capacity.
        """
        call, ids = "Engine.submit(request)", np.asarray(request.prompt)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"{call}: a prompt is a list of at least one id, but this one is {ids.dtype} of shape {ids.shape}; "
                "encode the text with the model's tokenizer."
            )
        for name, numbers in (
            ("prompt", ids),
            ("end_of_text", np.asarray(request.end_ids, object)),
            ("logit_bias", np.asarray(list(request.logit_bias), object)),
        ):
            check_ids(f"{call}: {name}", numbers, self.model.vocab)
        for name, number in (("seed", request.seed), ("example", request.example)):
            if not 0 <= number < 2**31:
                raise ValueError(f"{call}: {name} must be from 0 to {2**31 - 1}, but it is {number}; give another.")
        for setting, field, is_wanted in (
            ("allowed", "allowed", request.allowed is not None),
            ("log_probabilities", "alternatives", request.alternatives > 0),
        ):
            if is_wanted and (reason := self.unsupported.get(setting)):
                raise ValueError(f"{call}: {field}: {reason}; leave {field} out.")
        start, new = self.model.start, request.max_new_tokens
        longest = len(ids) + new if start is None else max(len(ids), 1 + new)
        if longest > self.capacity:
            raise ValueError(
                f"{call}: a prompt of {len(ids)} ids and {new} new tokens need a row of {longest}, but the engine's "
                f"rows have {self.capacity}; shorten the prompt, ask for fewer tokens, or build the engine with a "
                "larger capacity."
            )

    def submit(self, request: Request) -> int:
        """Queue a request for the next free slot, and return its number; raise the `ValueError` of `check`."""
        self.check(request)
        number = next(self._numbers)
        self._waiting.append((request, Result(number, len(request.prompt))))
        return number

    def cancel(self, number: int) -> None:
        """End a request at the next step; a request that has ended stays as it is."""
        self._cancelled.append(number)

    def step(self) -> list[Result]:
        """Give free slots to waiting requests, generate tokens for all slots, and return the results of all slots.

        The results of requests that were cancelled before they had a slot are returned, too. A result grows from step
        to step, and has a `finish` when the request has ended. After an error of a step, such as a full memory, the
        engine cannot go on.
        """
        return [*self._end_cancelled(), *self._advance()]

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Yield the result of each request when it ends; its `number` is the request's position in `requests`.

        Requests are taken from the iterable shortly before they can begin, up to twice as many as the engine has slots.
        Requests that are taken together begin in the order of their `max_new_tokens`, the largest first, so that no
        long text is generated alone at the end. A refused request has a result whose `finish` is `"error"`.
        """
        remaining = enumerate(requests)
        positions: dict[int, int] = {}
        while True:
            for position, request in self.take_requests(remaining, lambda item: item[1].max_new_tokens):
                try:
                    positions[self.submit(request)] = position
                except ValueError as error:
                    yield Result(position, len(request.prompt), finish="error", error=str(error))
            if self.is_idle:
                return
            for result in self.step():
                if result.finish and result.number in positions:
                    yield dataclasses.replace(result, number=positions.pop(result.number))

    def take_requests(self, remaining: Iterator[T], max_new_tokens: Callable[[T], int]) -> list[T]:
        """Return the next items of an iterator of requests, sorted by `max_new_tokens`, the largest first.

        The list is empty while at least `slots` requests wait. Otherwise the list fills the queue up to `2 * slots`
        requests.
        """
        waiting = len(self._waiting)
        taken = itertools.islice(remaining, 2 * self.slots - waiting if waiting < self.slots else 0)
        return sorted(taken, key=max_new_tokens, reverse=True)

    async def stream(self, request: Request) -> AsyncGenerator[Result, None]:
        """Yield the result of a request whenever it has grown, until it has ended.

        The steps run in a thread, for all streams of the engine together. Closing a stream cancels its request.
        """
        number = self.submit(request)
        queue = self._stream_queues[number] = asyncio.Queue()
        if self._stream_task is None or self._stream_task.done():
            self._stream_task = asyncio.create_task(self._feed_streams())
        result = None
        try:
            while result is None or not result.finish:
                result = await queue.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            del self._stream_queues[number]
            self.cancel(number)

    async def _feed_streams(self) -> None:
        """Run steps until no request is left, and pass the results, or the error of a step, to the streams."""
        while not self.is_idle:
            try:
                results = await asyncio.to_thread(self.step)
            except Exception as error:
                for queue in self._stream_queues.values():
                    queue.put_nowait(error)
                return
            for result in results:
                if result.number in self._stream_queues:
                    # Later steps extend the lists of the result, so the stream gets copies.
                    lists = {name: list(getattr(result, name)) for name in _GROWING}
                    self._stream_queues[result.number].put_nowait(dataclasses.replace(result, **lists))

    def _end_cancelled(self) -> list[Result]:
        """Mark cancelled requests as ended; return the results of requests that had no slot yet.

        `_advance` returns the results of the other cancelled requests.
        """
        cancelled = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        if not cancelled:
            return []
        ended = [result for result in self._waiting_results() if result.number in cancelled]
        started = [row.result for row in self._started_rows() if row.result.number in cancelled]
        for result in [*ended, *started]:
            result.finish = "cancelled"
        return ended

    def _waiting_results(self) -> Iterator[Result]:
        """Yield the results of requests that wait and have not ended; `_next_request` drops the ended ones."""
        return (result for _, result in list(self._waiting) if not result.finish)  # A copy: other threads may submit.

    def _next_request(self) -> tuple[Request, Result] | None:
        """Remove the next request that waits and has not ended from the queue; return it with its result."""
        while self._waiting:
            request, result = self._waiting.popleft()
            if not result.finish:
                return request, result
        return None


_GROWING = ("ids", "log_probabilities", "alternatives")
"""Lists of a result that grow from step to step."""


def pad_ids(ids: Int[np.ndarray, "tokens"], width: int) -> tuple[Int[jax.Array, "batch seq"], Int[jax.Array, "batch"]]:
    """Return ids as a padded batch of one row, and the number of ids before the padding."""
    return jnp.asarray(np.pad(ids, (0, width - len(ids)))[None]), jnp.asarray([len(ids)], jnp.int32)
