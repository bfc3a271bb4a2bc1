"""Requests to a model of block diffusion: each has the ids of `generate_blocks` alone, whatever the others do."""

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from test_blocks import BLOCK, MASK, model, PROMPTS, rows_of, VOCAB

from eqformer import generation
from eqformer.generation import BlockEngine, Request


END = 23
SETTINGS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0),
    dict(temperature=0.9, top_k=9, repetition_penalty=1.3),
)
REQUESTS = [
    Request(PROMPTS[number % 3], 4 + 3 * number, **SETTINGS[number % 2], end_of_text=END, seed=5, example=number)
    for number in range(5)
]


@functools.cache
def engine() -> BlockEngine:
    return BlockEngine(model(), mask_id=MASK, steps=2, slots=2, capacity=100)


def alone(request: Request) -> list[int]:
    """The new ids of a request by `generate_blocks`."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    text = generation.generate_blocks(
        model(),
        [request.prompt],
        max_new_tokens=request.max_new_tokens,
        mask_id=MASK,
        steps=2,
        transforms=generation.sampling(**{name: getattr(request, name) for name in names}),
        end_of_text=END,
        examples=[request.example],
        key=jax.random.key(request.seed),
    )
    return text.new_ids()[0]


def run(requests) -> list[generation.Result]:
    return sorted(engine().run(requests), key=lambda result: result.number)


@pytest.mark.grid
def test_each_request_has_the_ids_of_generate_blocks_alone():
    expected = [alone(request) for request in REQUESTS]
    results = run(REQUESTS)
    assert [result.ids for result in results] == expected
    assert {result.finish for result in results} == {"end", "length"}
    assert all((result.ids[-1] == END) == (result.finish == "end") for result in results)
    other = [dataclasses.replace(request, example=9) for request in REQUESTS]
    assert [result.ids for result in run(other)] != expected
    assert engine().is_idle and not results[0].log_probabilities


def test_streams_grow_by_blocks_and_end_where_the_request_says():
    request = dataclasses.replace(REQUESTS[4], end_of_text=(), ends=lambda ids: len(ids) == 6)

    async def read():
        return [list(result.ids) async for result in engine().stream(request)]

    stages = asyncio.run(read())
    whole = run([dataclasses.replace(request, ends=None)])[0].ids
    # The prompt has 8 ids, two whole blocks.
    assert [len(ids) for ids in stages] == [4, 6] and stages[-1] == whole[:6] and len(whole) == 16


@pytest.mark.grid
def test_stream_blocks_yields_the_ids_of_generate_blocks():
    call = functools.partial(
        generation.stream_blocks, model(), max_new_tokens=10, mask_id=MASK, steps=2, example=1, key=jax.random.key(3)
    )
    expected = generation.generate_blocks(
        model(), PROMPTS[1:2], max_new_tokens=10, mask_id=MASK, steps=2, examples=[1], key=jax.random.key(3)
    )
    assert list(call(PROMPTS[1])) == expected.new_ids()[0] != list(call(PROMPTS[1], example=0))
    short = generation.generate_blocks(
        model(),
        PROMPTS[:2],
        max_new_tokens=10,
        mask_id=MASK,
        steps=2,
        examples=[0, 1],
        ends_row=lambda row, ids: row == 1 and len(ids) >= 4,
        key=jax.random.key(3),
    )
    assert rows_of(short)[1] == rows_of(expected)[0][:12] and len(rows_of(short)[0]) == 15


@pytest.mark.grid
def test_a_cancelled_request_and_a_failing_function_leave_the_others_alone():
    def fails(ids):
        raise RuntimeError("no")

    numbers = [engine().submit(request) for request in REQUESTS[2:4]]
    failing = engine().submit(dataclasses.replace(REQUESTS[4], ends=fails))
    engine().cancel(numbers[0])
    results = {}
    while not engine().is_idle:
        results |= {result.number: result for result in engine().step() if result.finish}
    assert results[numbers[0]].finish == "cancelled" and "RuntimeError: no" in results[failing].error
    assert results[numbers[1]].ids == alone(REQUESTS[3])


def test_requests_that_need_one_token_after_another_are_refused():
    any_token = np.ones(VOCAB, bool)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"allowed": lambda ids: any_token}, "allowed: a model of block diffusion fills the tokens"),
        ({"alternatives": 2}, "alternatives: a model of block diffusion .* so they have no log-probabilities"),
        ({"max_new_tokens": 128}, "the engine's rows have 128"),
    ]
    for fields, words in wrong:
        with pytest.raises(ValueError, match=words):
            engine().check(dataclasses.replace(REQUESTS[0], **fields))
    with pytest.raises(ValueError, match=r"BlockEngine\(mask_id=29, .* mask_id must be one of the model's 29 ids"):
        BlockEngine(model(), mask_id=VOCAB)
    with pytest.raises(ValueError, match=r"BlockEngine\(slots=0\): slots must be at least 1"):
        BlockEngine(model(), mask_id=MASK, slots=0)
    with pytest.raises(ValueError, match=r"score_tokens\(model\): with masks of blocks a token sees later tokens"):
        generation.score_tokens(model(), PROMPTS[:1], PROMPTS[1:2])
    assert engine().capacity % BLOCK == 0 and engine().cache_bytes > 0
