"""`generate` and `stream` against a loop in plain Python that reads the whole text again for each token."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import make_model, write_on

from eqformer import generation, nn


KEY = jax.random.key(7)
PROMPTS = [[5, 9, 2, 44, 17], [3], [12, 60, 0, 1, 33, 33, 8, 21, 50]]
SETTINGS: dict[str, Any] = dict(temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
NEW = 12


@pytest.fixture(scope="module")
def model():
    return make_model("sliding window, few slots", sharpness=2.0)


@pytest.fixture(scope="module")
def plain():
    """For what hangs on no kind of layer; it sees the whole text."""
    return make_model(sharpness=2.0)


@pytest.fixture(scope="module")
def sampled(model):
    """Three rows, sampled with every transform and with log-probabilities."""
    transforms = generation.sampling(**SETTINGS)
    return generation.generate(
        model, PROMPTS, max_new_tokens=NEW, transforms=transforms, log_probabilities=True, key=KEY
    )


@pytest.mark.grid
def test_greedy_is_the_slow_loop(plain):
    found = generation.generate(
        plain, PROMPTS, max_new_tokens=NEW, transforms=generation.sampling(temperature=0), key=KEY
    )
    wanted = [write_on(plain, prompt, NEW, settings=dict(temperature=0))[0] for prompt in PROMPTS]
    assert found.new_ids() == wanted
    other = make_model(sharpness=2.0, seed=1)
    assert write_on(other, PROMPTS[0], NEW, settings=dict(temperature=0))[0] != wanted[0]


def test_log_probabilities_after_the_transforms_have_no_draft(plain):
    with pytest.raises(ValueError, match="with a draft, log-probabilities are known before the transforms only"):
        generation.generate(plain, PROMPTS, max_new_tokens=2, log_probabilities="transformed", draft=plain, key=KEY)


def test_samples_are_the_slow_loop(model, sampled):
    wanted = [write_on(model, p, NEW, settings=SETTINGS, key=KEY, example=n) for n, p in enumerate(PROMPTS)]
    assert sampled.new_ids() == [ids for ids, _ in wanted]
    for row, (_, nats), first in zip(sampled.log_probabilities, wanted, sampled.prompt_lengths):
        np.testing.assert_allclose(row[first : first + NEW], nats, atol=1e-4)
        assert np.count_nonzero(row) == NEW
    for changed in (dict(key=jax.random.key(8)), dict(example=5), dict(settings=dict(temperature=1.0))):
        given: dict[str, Any] = dict(settings=SETTINGS, key=KEY, example=0) | changed
        assert write_on(model, PROMPTS[0], NEW, **given)[0] != wanted[0][0]


def test_rows_hold_prompt_and_text(sampled):
    assert sampled.ids.shape == (3, 9 + NEW)
    for row, length, prompt, new in zip(sampled.ids, sampled.lengths, PROMPTS, sampled.new_ids()):
        assert row[:length].tolist() == prompt + new
        assert length == len(prompt) + NEW


def test_a_row_samples_the_same_wherever_it_stands(model, sampled):
    """By its number, which is its place where no numbers are given."""
    order = [2, 0, 1]

    def write(examples):
        return generation.generate(
            model,
            [PROMPTS[number] for number in order],
            max_new_tokens=NEW,
            transforms=generation.sampling(**SETTINGS),
            log_probabilities=True,
            examples=examples,
            key=KEY,
        ).new_ids()

    wanted = [sampled.new_ids()[number] for number in order]
    assert write(order) == wanted
    assert all(other != row for other, row in zip(write([3, 4, 5]), wanted))


@pytest.mark.grid
def test_a_row_alone_samples_what_it_samples_in_a_batch(model, sampled):
    transforms = generation.sampling(**SETTINGS)
    for number in (0, 2):
        alone = [
            generation.generate(
                model, [PROMPTS[number]], max_new_tokens=NEW, transforms=transforms, examples=[example], key=KEY
            )
            for example in (number, number + 1)
        ]
        assert alone[0].new_ids()[0] == sampled.new_ids()[number]
        assert alone[1].new_ids()[0] != sampled.new_ids()[number]


@pytest.mark.grid
@pytest.mark.parametrize("stride", [1, 5])
def test_a_stream_is_the_text_of_generate(model, sampled, stride):
    transforms = generation.sampling(**SETTINGS)
    ids = generation.stream(
        model, PROMPTS[2], max_new_tokens=NEW, transforms=transforms, example=2, stride=stride, key=KEY
    )
    assert list(ids) == sampled.new_ids()[2]


def test_a_text_ends_at_its_end(model, sampled):
    """The end of one row's text is sampled in mid-row; that row is left alone, the others go on as if nothing were."""
    transforms = generation.sampling(**SETTINGS)
    free = sampled.new_ids()
    end = free[2][4]
    wanted = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert len({len(row) for row in wanted}) > 1
    found = generation.generate(
        model,
        PROMPTS,
        max_new_tokens=NEW,
        transforms=transforms,
        log_probabilities=True,
        end_of_text=end,
        key=KEY,
    )
    assert found.new_ids() == wanted
    assert found.log_probabilities is not None
    for row, log_probabilities in enumerate(found.log_probabilities):
        assert np.count_nonzero(log_probabilities) == len(wanted[row])
        np.testing.assert_array_equal(found.ids[row, found.lengths[row] :], 0)
    streamed = generation.stream(
        model, PROMPTS[2], max_new_tokens=NEW, transforms=transforms, end_of_text=end, example=2, stride=5, key=KEY
    )
    assert list(streamed) == wanted[2]


def test_the_loop_stops_when_every_row_has_ended(plain):
    """An end that is met at once: a limit of many tokens costs no more than one, and the array is no wider."""
    calls = []

    def count(logits, history):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.full_like(logits, -jnp.inf).at[:, 3].set(0.0)

    found = generation.generate(plain, PROMPTS, max_new_tokens=40, transforms=(count,), end_of_text=3, key=KEY)
    jax.effects_barrier()
    assert found.new_ids() == [[3]] * 3 and found.ids.shape == (3, 10)
    assert len(calls) == 1


@pytest.mark.grid
@pytest.mark.parametrize("draft", [None, "draft"])
def test_a_row_ends_where_the_caller_says(plain, draft):
    options: dict[str, Any] = dict(max_new_tokens=50, log_probabilities=True, key=KEY)
    options |= {"draft": make_model(seed=1, sharpness=2.0) if draft else None}
    whole = generation.generate(plain, PROMPTS, **options)
    asked: list[tuple[int, int]] = []

    def ends_row(row, ids):
        asked.append((row, len(ids)))
        assert ids == whole.new_ids()[row][: len(ids)]
        return len(ids) >= (3, 20, 99)[row]

    cut = generation.generate(plain, PROMPTS, ends_row=ends_row, **options)
    lengths = [len(ids) for ids in cut.new_ids()]
    spare = 5 if draft else 0  # A draft's last proposals may go beyond a round.
    assert 3 <= lengths[0] <= 16 + spare and 20 <= lengths[1] <= 32 + spare and lengths[2] == 50
    for row, (some, all_ids) in enumerate(zip(cut.new_ids(), whole.new_ids())):
        assert some == all_ids[: len(some)]
        stop = int(cut.lengths[row])
        assert cut.log_probabilities is not None and whole.log_probabilities is not None
        np.testing.assert_allclose(
            cut.log_probabilities[row, :stop], whole.log_probabilities[row, :stop], rtol=1e-4, atol=1e-5
        )
    assert (0, 32) not in asked and asked[0][0] == 0


@pytest.mark.grid
def test_prompts_read_in_chunks_give_the_same_text(model, sampled):
    transforms = generation.sampling(**SETTINGS)
    given: dict[str, Any] = dict(max_new_tokens=NEW, transforms=transforms, log_probabilities=True, key=KEY)
    found = generation.generate(model, PROMPTS, prefill_chunk=4, **given)
    assert found.new_ids() == sampled.new_ids()
    assert found.log_probabilities is not None
    np.testing.assert_allclose(found.log_probabilities, sampled.log_probabilities, atol=1e-4)


def test_an_array_with_lengths_is_a_list_of_prompts(model, sampled):
    table = np.full((3, 9), 60)
    for row, prompt in zip(table, PROMPTS):
        row[: len(prompt)] = prompt
    given: dict[str, Any] = dict(
        max_new_tokens=NEW, transforms=generation.sampling(**SETTINGS), log_probabilities=True, key=KEY
    )
    found = generation.generate(model, table, lengths=[5, 1, 9], **given)
    assert found.new_ids() == sampled.new_ids()
    whole = generation.generate(model, jnp.asarray(table), **given)
    assert whole.new_ids() != sampled.new_ids() and whole.prompt_lengths.tolist() == [9, 9, 9]


def test_one_program_serves_other_prompts_counts_temperatures_and_keys(plain):
    traced = []

    class Anew(Exception):
        """Another program begins, which need not be compiled."""

    def once(logits, history):
        if is_made:
            raise Anew
        traced.append(1)
        return logits

    def run(prompts, new, temperature, seed):
        transforms = (once, generation.Temperature(temperature))
        generation.generate(plain, prompts, max_new_tokens=new, transforms=transforms, key=jax.random.key(seed))

    is_made = False
    run(PROMPTS[:2], 5, 0.7, 0)
    is_made = True
    assert traced
    run([[1] * 20, [2, 3]], 30, 1.2, 1)
    with pytest.raises(Anew):
        run([[1] * 20, [2, 3]], 60, 1.2, 1)  # 80 tokens are over the multiple of 64


def test_weights_are_arguments_and_logits_are_of_last_tokens_alone(model):
    """In the compiled text: no constant as large as a weight, no logits of every token of the prompt."""
    from eqformer.generation._decode import ProgramSizes
    from eqformer.generation._generate import _start_rows, make_sampling_state

    ids, lengths = jnp.ones((3, 64), jnp.int32), jnp.array([5, 1, 9], jnp.int32)
    samples = make_sampling_state(model, 3, (), None, None, KEY)
    limit, sizes = jnp.asarray(4, jnp.int32), ProgramSizes(64, 64, None)
    lowered = _start_rows.lower(model, ids, lengths, limit, samples, False, sizes, None)
    text = lowered.as_text()
    assert "tensor<3x64x32xf32>" in text and "tensor<3x61xf32>" in text
    assert "tensor<3x64x61xf32>" not in text
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line and len(line) > 2000]
    assert not constants
    arrays = len(jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    signature = text[text.index("@main") : text.index("->", text.index("@main"))]
    assert signature.count("%arg") >= arrays


@pytest.mark.grid
def test_bfloat16_writes_finite_text():
    model = make_model("sinks, sliding window", sharpness=2.0)
    low = nn.Precision("bfloat16", "bfloat16").apply(model)
    given: dict[str, Any] = dict(
        max_new_tokens=NEW, transforms=generation.sampling(temperature=0), log_probabilities=True, key=KEY
    )
    found = generation.generate(low, PROMPTS[:1], **given)
    assert found.log_probabilities is not None
    assert found.log_probabilities.dtype == np.float32
    assert np.isfinite(found.log_probabilities).all()
    ids, nats = write_on(model, PROMPTS[0], 1, settings=dict(temperature=0))
    assert found.new_ids()[0][:1] == ids
    np.testing.assert_allclose(found.log_probabilities[0, len(PROMPTS[0])], nats[0], atol=0.2)
    cache = low.init_cache(1, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16"), jnp.dtype("int32")}


@pytest.mark.quick
def test_samples_follow_the_distribution():
    """Of many rows of one prompt, each with a number of its own, tokens come as often as they are likely."""
    from eqformer.generation._decode import sample_ids, SamplingState

    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    count = 20_000
    samples = SamplingState(
        generation.chain(),
        jnp.broadcast_to(KEY, (count,)),
        jnp.arange(count, dtype=jnp.int32),
        jnp.zeros((count, 0), jnp.int32),
    )
    positions = jnp.ones(count, jnp.int32)
    ids = np.asarray(eqx.filter_jit(sample_ids)(jnp.broadcast_to(logits, (count, 4)), positions, samples))
    share = np.bincount(ids, minlength=4) / count
    deviation = np.sqrt(np.exp(logits) * (1 - np.exp(logits)) / count)
    assert np.all(np.abs(share - np.exp(logits)) < 4 * deviation)
    assert not np.all(np.abs(share - 0.25) < 4 * deviation)
