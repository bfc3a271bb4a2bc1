"""Rollouts of training on rewards: log-probabilities equal the trainer's, and runs resume."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import same_trees
from text_cases import Scripted, small_model, TEMPLATE, USER

from eqformer import data, nn, training
from eqformer.text import LLM, read_prompts, Rollouts


END = 10
ROWS = [{"prompt": text, "letter": letter} for text, letter in zip(("one", "fourteen", "a"), "xyz")]
SIZES: dict[str, Any] = {"prompts": 2, "group": 4, "max_new_tokens": 6, "temperature": 0.6}


def language_model(model: Any = None) -> LLM:
    return LLM(small_model() if model is None else model, data.ByteTokenizer(), end_ids=(END,))


def high_bytes(prompts, completions, **columns):
    """Reward characters that are no ASCII."""
    return [float(sum(ord(character) > 127 for character in text)) for text in completions]


def rollouts_of(reward: Any = high_bytes, rows: Any = ROWS, llm: Any = None, **options) -> Rollouts:
    settings: dict[str, Any] = SIZES | {"key": jax.random.key(0)} | options
    return Rollouts(llm or language_model(), rows, reward, **settings)


def batch_of(rollouts: Rollouts, model: Any = None, step: int = 0) -> Any:
    """The batch of one step by a model."""
    zero = jnp.zeros((), jnp.int32)
    state = training.TrainState(small_model() if model is None else model, None, zero, zero, zero)
    return rollouts(training.Progress(state, step, 10, {}))


@functools.cache
def in_dtype(dtype: str) -> Any:
    return nn.Precision(dtype, dtype).apply(small_model())


@eqx.filter_jit
def trainers_log_probs(model: Any, batch: Any) -> tuple[Any, Any]:
    """The trainer's log-probabilities, and those without the temperature."""
    warm = dataclasses.replace(batch, temperature=1.0)
    return training.token_log_probs(model, batch), training.token_log_probs(model, warm)


def differences_of(batch: Any, model: Any) -> tuple[float, float, float]:
    """How far the sampler's log-probabilities are from the trainer's, and from two that are wrong."""
    sampler, is_counted = np.asarray(batch.sampler_log_probs), np.asarray(batch.weights) > 0
    trainer, warm = map(np.asarray, trainers_log_probs(model, batch))
    distance = lambda x: float(np.abs(sampler - x)[is_counted].mean())
    return distance(trainer), distance(warm), distance(np.roll(trainer, 1, axis=1))


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), pytest.param("bfloat16", 2e-2, marks=pytest.mark.grid)])
def test_the_samplers_log_probabilities_are_the_trainers(dtype, bound):
    model = in_dtype(dtype)
    batch = batch_of(rollouts_of(), model)
    difference, without_temperature, shifted = differences_of(batch, model)
    assert difference < bound < 0.1 < min(without_temperature, shifted)


def test_a_batch_has_the_completions_and_their_advantages():
    rollouts = rollouts_of()
    batch = batch_of(rollouts)
    assert batch.ids.shape == (8, 16) and len(rollouts.samples) == 8
    rewards = [sample.reward for sample in rollouts.samples]
    assert rewards == high_bytes([], [sample.completion.text for sample in rollouts.samples])
    assert np.array_equal(batch.advantages, training.group_advantages(rewards, 4).advantages)
    for row, sample in enumerate(rollouts.samples):
        (start, *_), count = np.flatnonzero(batch.weights[row]), len(sample.completion.ids)
        assert start == len(sample.prompt) - 1 and batch.weights[row].sum() == count
        assert tuple(batch.targets[row, start : start + count]) == sample.completion.ids
    assert batch.row_metrics["reward"].tolist() == rewards
    other = batch_of(rollouts, step=1)  # another step has other prompts and samples
    assert not np.array_equal(batch.ids, other.ids)
    assert [len({tuple(row) for row in x.ids[:, :1].tolist()}) for x in (batch, other)] == [2, 2]


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"prompt": []}', '{"text": "a"}', "[1]"])
def test_a_row_without_a_prompt_is_refused(line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "letter": "x"}\n{"prompt": [{"role": "user", "content": "b"}], "letter": "y"}\n')
    rows = read_prompts(file)
    assert [row["letter"] for row in rows] == ["x", "y"] and rows[1]["prompt"][0]["content"] == "b"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"^read_prompts\('.*prompts.jsonl'\): prompts.jsonl#1: a row has a prompt"):
        read_prompts(file)


def test_several_processes_need_a_plan(monkeypatch):
    rollouts_of()  # the control
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^Rollouts\(plan=None\): 2 processes sample together under the plan"):
        rollouts_of()


@pytest.mark.grid
def test_the_greedy_reward_is_of_each_row_once():
    sizes = list[int]()

    def reward(prompts, completions, **columns):
        sizes.append(len(prompts))
        return high_bytes(prompts, completions)

    model, rows = small_model(), [*ROWS, *({"prompt": letter, "letter": letter} for letter in "bcdefgh")]
    rollouts = rollouts_of(reward, rows)
    mean = rollouts.greedy_reward(model)
    expected = language_model(model).generate([row["prompt"] for row in rows], max_new_tokens=6, temperature=0.0)
    assert sizes == [8, 2] and mean == np.mean(high_bytes([], expected))
    assert rollouts_of(rows=rows, key=jax.random.key(9)).greedy_reward(model) == mean
    assert rollouts_of(rows=rows[:8]).greedy_reward(model) != mean  # the control


def test_columns_and_messages_reach_the_reward(tmp_path):
    seen = []

    def remember(prompts, completions, letter):
        seen.append((prompts, letter))
        return [0.0] * len(prompts)

    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    llm = dataclasses.replace(language_model(), chat_template=data.ChatTemplate(tmp_path))
    rows = [{"prompt": [USER], "letter": "x"}, {"prompt": [USER, USER], "letter": "y"}]
    rollouts = rollouts_of(remember, rows, llm)
    batch = batch_of(rollouts)
    ((prompts, letters),) = seen
    assert letters in ([*"xxxxyyyy"], [*"yyyyxxxx"]) and prompts[letters.index("y")] == [USER, USER]
    assert bytes(batch.ids[letters.index("x"), :19].tolist()) == b"<user>Hi<assistant>"
    assert float(np.mean(batch.row_metrics["groups_without_signal"])) == 1 and not np.any(batch.advantages)


def test_prompts_that_the_template_refuses_are_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    llm = dataclasses.replace(language_model(), chat_template=data.ChatTemplate(tmp_path))
    rows_with = lambda role: [{"prompt": [USER]}, {"prompt": [USER | {"role": role}]}]
    rollouts_of(rows=rows_with("system"), llm=llm)  # the control
    with pytest.raises(ValueError, match=r"^Rollouts\(rows=\[...\]\): row 1: message 0 has the role 'human', which"):
        rollouts_of(rows=rows_with("human"), llm=llm)
    with pytest.raises(ValueError, match=r"^Rollouts\(rows=\[...\]\): row 1: .*no tools here"):
        rollouts_of(rows=rows_with("tool"), llm=llm)


def test_completions_that_are_left_out():
    def first_group(prompts, completions, **columns):
        return [float(number == 0) for number in range(len(prompts))]

    every_group = batch_of(rollouts_of(first_group))
    one_group = batch_of(rollouts_of(first_group, mask_equal_groups=True))
    assert np.array_equal(one_group.ids, every_group.ids)
    assert one_group.weights[:4].any() and not one_group.weights[4:].any()
    assert every_group.weights[4:].any()
    # The second group is replaced by the first of further prompts.
    filled = rollouts_of(first_group, mask_equal_groups=True, resample=1)
    batch = batch_of(filled)
    assert np.array_equal(batch.ids[:4], every_group.ids[:4])
    assert not np.array_equal(batch.ids[4:], every_group.ids[4:])
    assert batch.weights[4:].any() and [sample.reward for sample in filled.samples] == [1.0, 0, 0, 0] * 2
    difference, _, shifted = differences_of(batch, small_model())
    assert difference < 1e-5 < 0.1 < shifted
    masked = rollouts_of(mask_truncated=True)
    batch = batch_of(masked)
    ends = [sample.completion.finish_reason == "stop" for sample in masked.samples]
    assert np.array_equal(batch.weights.any(axis=1), ends)
    assert float(batch.row_metrics["truncated"].mean()) == 1 - np.mean(ends)


def test_a_step_prepares_its_model_once_and_reads_batches_of_one_structure():
    options: Any = {"reference": lambda model: model, "updates": 2, "resample": 2}
    rollouts = rollouts_of(lambda prompts, completions, **columns: [0.0] * len(prompts), **options)
    prepare, log_probs = rollouts._decoding_model, rollouts._log_probs
    prepared, structures = list[Any](), list[Any]()

    def note_model(model: Any) -> Any:
        prepared.append(model)
        return prepare(model)

    def note_structure(model: Any, batch: Any) -> Any:
        structures.append(jax.tree.structure(batch))
        return log_probs(model, batch)

    rollouts._decoding_model, rollouts._log_probs = note_model, note_structure
    batch = batch_of(rollouts)
    assert len(prepared) == 1 and len(structures) == 2 and structures[0] == structures[1]
    assert jax.tree.structure(batch) != structures[0]  # the control
    assert np.array_equal(batch.old_log_probs, batch.reference_log_probs)


def train(rollouts: Rollouts, steps: int, state: Any = None, start: int = 0, callbacks: Any = ()) -> Any:
    copy = lambda: jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, small_model())
    optimizer = training.optimizer("adamw", small_model(), rate=training.constant(1e-2))
    step = training.make_step(training.policy_loss("dapo", beta=0.01), optimizer)
    state = training.init_state(copy(), optimizer) if state is None else state
    return training.train(step, state, rollouts, steps=steps, start=start, callbacks=callbacks)


@pytest.mark.grid
def test_a_run_raises_its_rewards_and_goes_on():
    options: Any = {"reference": lambda model: small_model(), "updates": 2, "group": 8, "temperature": 1.0}
    logged: list[Any] = []
    run = train(rollouts_of(**options), 8, callbacks=[training.Log(1, logged.append)])
    assert logged[-1]["reward"] > logged[0]["reward"] + 1
    assert logged[0]["kl"] == pytest.approx(0, abs=1e-6) and logged[-1]["kl"] > 1e-3
    assert logged[0]["sampler_difference"] < 1e-5 and logged[1]["sampler_difference"] > 1e-3  # of an older model
    part = train(rollouts_of(**options), 4)
    halfway = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, part.state)
    resumed = train(rollouts_of(**options), 8, part.state, start=4)
    assert same_trees(resumed.state, run.state)
    assert not same_trees(halfway.model, run.state.model)  # the control


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda texts: [0.0] * (len(texts) - 1), r"it returned 7 rewards for 8 completions; return one for each"),
        (lambda texts: [0.0] * 7 + [float("nan")], r"the reward of completion 7 \(.*\) is nan; return finite numbers"),
        (lambda texts: [None] * 8, r"it did not return numbers"),
        (lambda texts: {}["answer"], r"it raised KeyError: 'answer'; correct the function"),
    ],
)
def test_rewards_that_fail_are_told_before_a_step(answer, message):
    def broken(prompts, completions, **columns):
        return answer(completions)

    call = r"Rollouts\(reward=broken\): for step 4, of prompts \[\d, \d\], "
    with pytest.raises(ValueError, match=call + message):
        batch_of(rollouts_of(broken), step=3)


@pytest.mark.grid
def test_a_reward_that_fails_later_leaves_the_steps_before_it():
    calls, saved = [], []

    def fails_later(prompts, completions, **columns):
        calls.append(1)
        return [0.0, 1.0] * (len(prompts) // 2) if len(calls) < 3 else []

    with pytest.raises(ValueError, match=r"for step 3, .*returned 0 rewards"):
        note = training.Every(1, lambda run: saved.append((run.step, int(run.state.step))))
        train(rollouts_of(fails_later, reference=lambda model: model), 5, callbacks=[note])
    assert saved == [(1, 1), (2, 2)]


def test_what_is_refused():
    def refused(**options) -> str:
        with pytest.raises(ValueError) as error:
            rollouts_of(**options)
        return str(error.value)

    assert "Rollouts(group=1): it must be at least 2" in refused(
        group=1
    ) and "Rollouts(rows=[]): there is no row" in refused(rows=[])
    assert "Rollouts(temperature=0.0): completions are sampled" in refused(temperature=0.0)
    assert "but row 1 has ['prompt']; give all rows the same fields" in refused(rows=[ROWS[0], {"prompt": "b"}])
    assert "Rollouts(rows=[...]): row 0 has messages, and the LLM no chat template" in refused(
        rows=[{"prompt": [USER]}]
    )
    assert "the prompt of row 0 has no tokens" in refused(rows=[{"prompt": ""}])
    short = language_model(Scripted(jnp.zeros(8, jnp.int32), max_seq=8))
    assert "the longest prompt has 8 tokens, and with a completion exceeds the model's 8 positions" in refused(
        llm=short
    )
