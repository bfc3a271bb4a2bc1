"""Each request of an engine gets the ids of `generate` alone, whatever other requests run beside it."""

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import KINDS, make_model, VOCAB
from haste import jax_moves
from text_cases import scripted

from eqformer import generation, models
from eqformer.generation import _engine, Engine, Request


END = 7
SIZES: dict[str, Any] = dict(slots=3, capacity=192, prefill_chunk=64, stride=4)
SETTINGS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0),
    dict(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
)
QUICK = "local and global"
DECODERS = [family for family in models.FAMILIES.values() if family.decodes_tokens]
PRESETS = [name for family in DECODERS for name in family.presets if "-byte-" in name]


@pytest.fixture(scope="module")
def model():
    return make_model("local and global", sharpness=2.0)


@pytest.fixture(scope="module")
def script():
    """A model that compiles quickly, for tests of when rows are read and decoded; it writes numbers that ascend."""
    return scripted("".join(map(chr, range(1, 128)))).model


def make_requests(vocab=VOCAB, count=7, longest=20, end=END):
    """Requests of unlike lengths and settings, three of which begin with the same 70 ids."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, vocab, 70).tolist()
    requests = []
    for number in range(count):
        prompt = rng.integers(1, vocab, rng.integers(1, 40)).tolist()
        prompt = shared + prompt if number in (1, 3, 4) else prompt
        new = int(rng.integers(1, longest))
        requests.append(Request(prompt, new, **SETTINGS[number % 2], end_of_text=end, seed=5, example=number))
    return requests


def generate_together(model, requests, **options):
    """The ids and log-probabilities of each request by `generate`, which continues those of like settings together."""
    sampled = {}
    for first in range(len(SETTINGS)):
        numbers = range(len(requests))[first :: len(SETTINGS)]
        those = [requests[number] for number in numbers]
        result = generation.generate(
            model,
            [request.prompt for request in those],
            max_new_tokens=max(request.max_new_tokens for request in those),
            transforms=generation.sampling(**SETTINGS[first]),
            end_of_text=END,
            log_probabilities=True,
            examples=[request.example for request in those],
            key=jax.random.key(5),
            **options,
        )
        assert result.log_probabilities is not None
        for row, number in enumerate(numbers):
            new = result.new_ids()[row][: requests[number].max_new_tokens]
            start = int(result.prompt_lengths[row])
            sampled[number] = new, result.log_probabilities[row, start : start + len(new)]
    return sampled


def arrive(engine, requests, gaps):
    """Submit each request after a number of steps; return the results when all have ended."""
    results, numbers = {}, {}
    for position, gap in enumerate(gaps):
        for _ in range(gap):
            results |= {result.number: result for result in engine.step()}
        numbers[engine.submit(requests[position])] = position
    while not engine.is_idle:
        results |= {result.number: result for result in engine.step()}
    return {position: results[number] for number, position in numbers.items()}


def check_exact(model, requests, tolerance=1e-4, **options):
    engine = Engine(model, **SIZES, **options)
    gaps = np.random.default_rng(1).integers(0, 3, len(requests))
    results = arrive(engine, requests, gaps)
    for number, (ids, log_probabilities) in generate_together(model, requests, **options).items():
        assert results[number].ids == ids
        np.testing.assert_allclose(results[number].log_probabilities, log_probabilities, atol=tolerance)
        ended = ids[-1] == END
        assert results[number].finish == ("end" if ended else "length")
        assert ended or len(ids) == requests[number].max_new_tokens
    return results


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == QUICK else pytest.mark.grid) for k in KINDS])
def test_a_request_is_continued_as_alone(kind):
    model, requests = make_model(kind, sharpness=2.0, max_seq=SIZES["capacity"]), make_requests()
    results = check_exact(model, requests)
    # Another seed gives other ids, so the comparison can fail.
    engine = Engine(model, **SIZES)
    (other,) = engine.run([dataclasses.replace(requests[1], seed=6, max_new_tokens=12)])
    assert other.ids[: len(results[1].ids)] != results[1].ids[: len(other.ids)]


@pytest.mark.grid
@pytest.mark.parametrize("preset", PRESETS)
def test_a_request_to_any_family_is_continued_as_alone(preset):
    model = models.build(preset, key=jax.random.key(0))
    check_exact(model, make_requests(vocab=256, count=5))


@pytest.mark.parametrize(
    "dtype", [pytest.param("int8", marks=pytest.mark.grid), pytest.param("fp8", marks=pytest.mark.grid)]
)
def test_a_request_with_a_rounded_cache_is_continued_as_alone(model, dtype):
    check_exact(model, make_requests(), cache_dtype=dtype)


def test_numbers_depend_on_no_other_request(model):
    """Bit for bit: alone in any slot, among others that come before or after, with and without a shared beginning."""
    requests = make_requests()
    engine = functools.partial(Engine, model, **SIZES)
    forth = arrive(engine(), requests, [0] * len(requests))
    back = arrive(engine(), requests[::-1], [0, 3, 1, 0, 0, 2, 0])
    unshared = arrive(engine(prefixes=0), requests, [1, 0, 0, 4, 0, 0, 1])
    (alone,) = engine().run(requests[3:4])
    for number, result in forth.items():
        for other in (back[len(requests) - 1 - number], unshared[number], *([alone] if number == 3 else [])):
            assert other.ids == result.ids and other.log_probabilities == result.log_probabilities
    # The first prompt with the shared beginning shows it, the second one keeps its cache, and the third one uses it.
    assert [forth[number].shared_length for number in range(7)] == [0, 0, 0, 0, 64, 0, 0]
    assert not any(result.shared_length for result in unshared.values())


@jax_moves()
def test_no_program_is_compiled_and_no_memory_is_taken_for_further_requests(model):
    engine, requests = Engine(model, **SIZES), make_requests()
    list(engine.run(requests))
    live_bytes = lambda: sum(x.nbytes for x in jax.live_arrays())
    before, compiled = live_bytes(), []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append((event, duration_secs, kwargs))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        rng = np.random.default_rng(2)
        others = [
            dataclasses.replace(
                request, prompt=rng.integers(1, VOCAB, rng.integers(1, 90)).tolist(), temperature=0.9, top_k=4
            )
            for request in requests
        ]
        list(engine.run(others))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled and live_bytes() <= before + engine.cache_bytes
    slots = sum(x.nbytes for x in jax.tree.leaves(engine._state.tree.rows.cache))
    assert engine.cache_bytes == slots + (1 + 4) * slots // 3


def test_texts_end_where_the_request_says(model):
    prompt = [3, 5, 9]
    engine = Engine(model, **SIZES)
    (plain,) = engine.run([Request(prompt, 12)])
    third = plain.ids[2]
    first = plain.ids.index(third)
    requests = [
        Request(prompt, 12, ends=lambda ids: len(ids) == 6),
        Request(prompt, 12, end_of_text=[VOCAB - 1, third]),
        Request(prompt, 3),
    ]
    stop, end, length = sorted(engine.run(requests), key=lambda result: result.number)
    assert (stop.ids, stop.finish) == (plain.ids[:6], "stop")
    assert (end.ids, end.finish) == (plain.ids[: first + 1], "end")
    assert (length.ids, length.finish) == (plain.ids[:3], "length")


def test_likely_ids_are_told_beside_each_id(model):
    """They are those of the uncached pass, for the requests that ask for them, whatever the sampling settings."""
    asked, silent = make_requests()[1], make_requests()[0]
    engine = Engine(model, **SIZES)
    asked = dataclasses.replace(asked, alternatives=4, temperature=3.0)
    result, other = sorted(engine.run([asked, silent]), key=lambda result: result.number)
    assert {*other.alternatives} == {()} and len(other.alternatives) == len(other.ids)
    assert [len(likely) for likely in result.alternatives] == [4] * len(result.ids)
    (scores,) = generation.score_tokens(model, [asked.prompt], [result.ids], alternatives=4)
    for likely, ids, values in zip(result.alternatives, scores.alternative_ids, scores.alternative_log_probabilities):
        assert [token for token, _ in likely] == ids.tolist()
        np.testing.assert_allclose([value for _, value in likely], values, rtol=1e-4)
    for likely, token, value in zip(result.alternatives, result.ids, result.log_probabilities):
        assert dict(likely).get(token, value) == value
    greedy = [token == likely[0][0] for token, likely in zip(result.ids, result.alternatives)]
    assert greedy == scores.is_greedy.tolist() and not all(greedy)
    with pytest.raises(ValueError, match="alternatives=21"):
        dataclasses.replace(asked, alternatives=21)


def test_logits_are_biased_and_masked_for_each_request(model):
    prompt = [3, 5, 9]
    even = np.arange(VOCAB) % 2 == 0
    alternating = lambda ids: even if len(ids) % 2 == 0 else ~even
    engine = Engine(model, **SIZES)
    (plain,) = engine.run([Request(prompt, 8)])
    requests = [
        Request(prompt, 8),
        Request(prompt, 8, logit_bias={plain.ids[0]: -np.inf, 11: 2.0}),
        Request(prompt, 8, allowed=alternating, temperature=1.0),
    ]
    same, biased, masked = sorted(engine.run(requests), key=lambda result: result.number)
    assert same.ids == plain.ids
    add = np.zeros(VOCAB, np.float32)
    add[plain.ids[0]], add[11] = -np.inf, 2.0
    bias = lambda logits, history: logits + add
    expected = generation.generate(
        model, [prompt], max_new_tokens=8, transforms=(bias, generation.Temperature(0)), key=jax.random.key(0)
    )
    assert biased.ids == expected.new_ids()[0] != plain.ids
    assert [token % 2 for token in masked.ids] == [0, 1] * 4
    assert len(set(masked.ids)) > 2


@pytest.mark.grid
def test_sampled_ids_are_penalized_for_each_request(model):
    """By a literal loop over the new ids of the row; the prompt does not count, and neighbours change nothing."""
    prompt, new, presence, frequency = [3, 5, 9], 12, 0.7, 0.4
    tune: dict[str, Any] = dict(presence_penalty=presence, frequency_penalty=frequency)
    engine = Engine(model, **SIZES)
    requests = [
        Request(prompt, new),
        Request(prompt, new, **tune),
        Request(prompt, new, **tune, temperature=0.8, seed=2),
        Request([7] * 70, 5, presence_penalty=-2.0, temperature=1.0),
    ]
    plain, penalized, sampled, _ = sorted(engine.run(requests), key=lambda result: result.number)
    (alone,) = engine.run(requests[1:2])
    assert alone.ids == penalized.ids and alone.log_probabilities == penalized.log_probabilities

    def penalize(logits, history):
        for token in range(3, 3 + new):
            same = jnp.arange(VOCAB) == jnp.where(token < history.lengths[0], history.ids[0, token], -1)
            is_first = ~jnp.any(history.ids[0, 3:token] == history.ids[0, token])
            logits = logits - jnp.where(same, frequency + jnp.where(is_first, presence, 0.0), 0.0)
        return logits

    for result, temperature, seed in ((penalized, 0.0, 0), (sampled, 0.8, 2)):
        transforms, key = (penalize, generation.Temperature(temperature)), jax.random.key(seed)
        expected = generation.generate(model, [prompt], max_new_tokens=new, transforms=transforms, key=key)
        assert result.ids == expected.new_ids()[0] != plain.ids


def test_masked_requests_alone_take_one_program(model, monkeypatch):
    """Also for the first step, before whose mask the host has to see the token that was sampled after the prompt."""
    programs = set()
    decode_slots = _engine.decode_slots

    def decode_and_note(inputs, slots, *static):
        programs.add((jax.tree.structure(inputs), *static))
        return decode_slots(inputs, slots, *static)

    monkeypatch.setattr(_engine, "decode_slots", decode_and_note)
    masked = Request([3, 5, 9], 4, allowed=lambda ids: np.arange(VOCAB) % 2 == len(ids) % 2, temperature=1.0)
    engine = Engine(model, **SIZES)
    (result,) = engine.run([masked])
    assert [token % 2 for token in result.ids] == [0, 1, 0, 1] and len(programs) == 1
    list(engine.run([dataclasses.replace(masked, allowed=None)]))  # The control: no biases, which is another program.
    assert len(programs) == 2


def test_a_request_that_cannot_go_on_ends_alone(model):
    requests = [
        Request([1, 2], 6),
        Request([1, 2], 6, allowed=lambda ids: np.full(VOCAB, len(ids) < 2)),
        Request([1, 2], 6, logit_bias={3: np.nan}, temperature=1.0),
        Request([1, 2], 6, ends=lambda ids: ids[7] == 0),
        Request([1, 2], 6, allowed=lambda ids: np.ones(3)),
    ]
    good, masked, nan, index, shape = sorted(Engine(model, **SIZES).run(requests), key=lambda result: result.number)
    (alone,) = Engine(model, **SIZES).run(requests[:1])
    assert good.ids == alone.ids and good.finish == "length"
    assert len(masked.ids) == 2 and not nan.ids
    assert masked.finish == nan.finish == "error" and "left no token to sample" in masked.error
    assert index.finish == shape.finish == "error" and len(index.ids) == 1
    assert "the request raised IndexError: list index" in index.error and "raised IndexError" in shape.error
    broken = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, model)
    (result,) = Engine(broken, **SIZES).run(requests[:1])
    assert result.finish == "error" and "logits are NaN" in result.error and not result.ids


def test_requests_are_cancelled_wherever_they_are(model):
    engine = Engine(model, **SIZES)
    requests = [Request([1, 2, number], 40) for number in range(4)] + [Request([4] * 100, 8)]
    numbers = [engine.submit(request) for request in requests]
    engine.step()
    for number in numbers[1:]:
        engine.cancel(number)
    results = {}
    while not engine.is_idle:
        results |= {result.number: result for result in engine.step() if result.finish}
    assert {results[number].finish for number in numbers[1:]} == {"cancelled"}
    (alone,) = engine.run(requests[:1])
    assert results[numbers[0]].ids == alone.ids and len(alone.ids) == 40


def test_a_step_ends_early_for_a_request_that_waits_and_not_for_a_cancelled_one(script):
    def run_first_step(cancels: bool) -> int:
        engine = Engine(script, **dict(SIZES, slots=2))
        _, longer, waiting = (engine.submit(Request([3], new)) for new in (2, 40, 40))
        if cancels:
            engine.cancel(waiting)
        return next(len(result.ids) for result in engine.step() if result.number == longer)

    assert run_first_step(cancels=True) == 1 + SIZES["stride"]
    assert run_first_step(cancels=False) == 2  # as many as the shorter one has


def test_slots_are_filled_before_a_step_and_again_when_a_row_has_ended(script):
    requests = [Request([3 + number], new) for number, new in enumerate((3, 12, 5))]

    def step_lengths(requests):
        engine = Engine(script, **dict(SIZES, slots=2, stride=8))
        for request in requests:
            engine.submit(request)
        return [{result.number: len(result.ids) for result in engine.step()} for _ in range(2)]

    assert step_lengths(requests) == [{0: 3, 1: 3}, {1: 11, 2: 5}]
    assert step_lengths(requests[:2]) == [{0: 3, 1: 9}, {1: 12}]  # The control: no request waits.


def test_a_run_begins_long_texts_first_and_tells_the_positions_of_requests(script):
    """Otherwise a long text that begins last is generated alone, while the other slots are free."""
    requests = [Request([3] * (10 * number + 1), new) for number, new in enumerate((2, 9, 4, 3, 12, 5, 2))]
    engine, begun = Engine(script, **dict(SIZES, slots=2)), []
    submit = engine.submit
    engine.submit = lambda request: begun.append(request.max_new_tokens) or submit(request)
    results = {result.number: result.ids for result in engine.run(iter(requests))}
    assert begun[:4] == [9, 4, 3, 2] and sorted(begun[4:]) == [2, 5, 12] and begun[4] == 12
    assert [len(results[number]) for number in range(7)] == [2, 9, 4, 3, 12, 5, 2]
    # By the position of each request's first new token in the script.
    assert [results[number] for number in range(7)] == [
        [*range(10 * number + 2, 10 * number + 2 + request.max_new_tokens)] for number, request in enumerate(requests)
    ]


def test_texts_do_not_wait_for_all_of_a_long_prompt(script):
    engine = Engine(script, **dict(SIZES, slots=8, capacity=576))
    long, other = (Request([*range(first, first + 8)] * 64, 2) for first in (1, 2))  # of eight chunks

    def chunks_of_next_step():
        read = engine._reading.read if engine._reading else 0
        engine.step()
        return ((engine._reading.read if engine._reading else len(long.prompt)) - read) // 64

    engine.submit(long)
    assert chunks_of_next_step() == 8  # No text waits.
    engine.submit(Request([1, 2], 100))
    engine.step()
    engine.submit(other)
    assert [chunks_of_next_step() for _ in range(2)] == [4, 4]


def test_deleted_caches_leave_their_memory(model):
    live_bytes = lambda: sum(array.nbytes for array in jax.live_arrays())
    engine = Engine(model, **SIZES)
    for request in make_requests():
        engine.submit(request)
    while not engine._prefixes.caches():
        engine.step()
    before, cache_bytes = live_bytes(), engine.cache_bytes
    engine.delete_caches()
    assert before - live_bytes() > cache_bytes / 2
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        engine.step()
    (other,) = Engine(model, **SIZES).run([Request([1, 2], 6)])  # The model's own arrays are left.
    assert len(other.ids) == 6


def test_streams_yield_growing_results_and_a_closed_one_is_cancelled(model):
    engine, requests = Engine(model, **SIZES), make_requests()

    async def read(request, max_ids=None):
        lengths = []
        async for result in engine.stream(request):
            lengths.append(len(result.ids))
            if max_ids is not None and len(result.ids) >= max_ids:
                break
        return result, lengths

    async def read_all():
        # A task that leaves its loop early closes its stream.
        return await asyncio.gather(*map(read, requests), read(Request([1, 2, 3], 100), max_ids=1))

    *results, (left, _) = asyncio.run(read_all())
    expected = arrive(Engine(model, **SIZES), requests, [0] * len(requests))
    for number, (result, lengths) in enumerate(results):
        assert result.ids == expected[number].ids
        assert lengths == sorted(lengths) and lengths[-1] == len(result.ids)
    assert not left.finish and engine.is_idle


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request([1], 0), r"max_new_tokens=0\): at least 1"),
        (lambda: Request([1], temperature=-1), "temperatures are finite"),
        (lambda: Request([1], top_k=0), r"TopK\(0\)"),
        (lambda: Request([1], top_p=0.0), r"TopP\(0.0\)"),
        (lambda: Request([1], min_p=np.nan), r"MinP\(nan\)"),
        (lambda: Request([1], repetition_penalty=0), r"RepetitionPenalty\(0\)"),
        (lambda: Request([1], presence_penalty=101), r"presence_penalty=101\): a penalty is from -100 to 100"),
        (lambda: Request([1], frequency_penalty=np.nan), "frequency_penalty=nan"),
        (lambda: Request([1], end_of_text=[*range(17)]), "17 ids end the text, but at most 16"),
        (lambda: Request([]), "a list of at least one id"),
        (lambda: Request([1, VOCAB]), "prompt holds the id 61, but the model's 61 ids are 0 to 60"),
        (lambda: Request([1], end_of_text=-1), "end_of_text holds the id -1"),
        (lambda: Request([1], logit_bias={99: 1.0}), "logit_bias holds the id 99"),
        (lambda: Request([1], logit_bias={10**30: 1.0}), f"logit_bias holds the id {10**30}"),
        (lambda: Request([1], end_of_text=10**30), f"end_of_text holds the id {10**30}"),
        (lambda: Request([1] * 190, 3), "a prompt of 190 ids and 3 new tokens need a row of 193, but .* have 192"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(model, make, message):
    engine = Engine(model, **SIZES)
    with pytest.raises(ValueError, match=message):
        engine.submit(make())
    assert engine.is_idle


@pytest.mark.grid
def test_rows_are_as_long_as_learned_positions_allow():
    """The last token that is sampled needs no position."""
    model, prompt = make_model("learned positions", max_seq=40), [3, 5, 9] * 4
    engine = Engine(model, slots=2, capacity=64, stride=4)
    (result,) = engine.run([Request(prompt, 29)])
    greedy = generation.sampling(temperature=0)
    alone = generation.generate(model, [prompt], max_new_tokens=29, transforms=greedy, key=jax.random.key(0))
    assert result.ids == alone.new_ids()[0] and len(result.ids) == 29
    with pytest.raises(ValueError, match="need a row of 42, but the engine's rows have 41"):
        engine.submit(Request(prompt, 30))


def test_what_an_engine_cannot_do_is_refused(model):
    engine = Engine(model, **SIZES, draft=model)
    with pytest.raises(ValueError, match="allowed: a draft proposes several tokens at a time"):
        engine.submit(Request([1], 3, allowed=lambda ids: np.ones(VOCAB, bool)))
    with pytest.raises(ValueError, match=r"Engine\(prefixes=-1\): prefixes must be at least 0"):
        Engine(model, **SIZES, prefixes=-1)


def test_a_refused_request_does_not_end_a_run(model):
    requests = [Request([1, 2], 3), Request([VOCAB], 3), Request([2, 1], 3)]
    results = {result.number: result for result in Engine(model, **SIZES).run(requests)}
    assert [results[number].finish for number in range(3)] == ["length", "error", "length"]
    assert "prompt holds the id 61" in results[1].error
    for name in SIZES:
        sizes: dict[str, Any] = SIZES | {name: 0}
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            Engine(model, **sizes)
