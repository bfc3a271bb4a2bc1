"""A run that continues to another number of steps: its learning rate never jumps unless the user asks for it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrain import Command
from script_helpers import LLAMA, rows, run_here, TINY, write_corpus
from support.command import parse

from eqformer import models, training
from eqformer.recipes import check, Recipe, RunDirectory
from eqformer.recipes._run_directory import schedule_phases


def recipe(steps, rates_name: Any = "warmup-cosine", *, prolong: Any = "refuse", warmup=None, **more):
    chosen = training.Optimization(rates=rates_name, warmup=warmup, learning_rate=1e-2)
    return Recipe(models.preset("llama-byte-1m"), steps=steps, prolong=prolong, optimizer=chosen, **more)


def save(folder, at, phases, keep=None):
    with training.Checkpointer(folder, keep=keep) as checkpointer:
        checkpointer.save({"x": jnp.zeros(1)}, at, {"rates": list(map(dataclasses.asdict, phases))})
    return training.Checkpointer(folder)


def whole_run(recipe):
    return recipe.optimizer.phases(recipe.steps)


def rates(run, phases):
    schedule = run.optimizer.make_rates(phases)
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(run.steps)))


def cosine(steps, warmup, at):
    if at < warmup:
        return 1e-2 * (at + 1) / (warmup + 1)
    share = (at - warmup) / (steps - warmup)
    return 1e-2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * share)))


def test_a_longer_cosine_is_refused_with_what_would_come_and_follows_what_is_asked(tmp_path):
    saved = save(tmp_path, 100, whole_run(recipe(100)))
    with pytest.raises(ValueError) as refused:
        schedule_phases(recipe(200), saved)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("--steps 200: the run was planned for 100 steps, and the learning rate was 0.001")
    assert "at step 100" in lines[0] and len(lines) == 4
    assert lines[1].strip() == "--prolong hold: 0.001 at step 101, 0.001 at step 200"
    assert lines[2].strip() == "--prolong rewarm: 0.000909 at step 101, 0.01 at step 111, 0.001 at step 200"
    assert lines[3].strip().startswith("--prolong reshape: 0.00") and lines[3].endswith("0.001 at step 200")

    past = [cosine(100, 10, step) for step in range(100)]
    last = past[-1]
    future = {
        "hold": [last] * 100,
        "rewarm": [cosine(100, 10, step) for step in range(100)],
        "reshape": [cosine(200, 10, step) for step in range(100, 200)],
    }
    for how, expected in future.items():
        asked = recipe(200, prolong=how)
        chosen, note = schedule_phases(asked, saved)
        np.testing.assert_allclose(rates(asked, chosen), past + expected, rtol=2e-5)
        assert f"--prolong {how}" in note
        later = save(tmp_path / how, 150, chosen)  # a checkpoint of the longer run knows what was chosen
        assert schedule_phases(recipe(200), later) == (chosen, "")
    assert abs(last - future["reshape"][0]) > 1e-3  # the control: that one jumps


@pytest.mark.parametrize("steps", [99, 100])
def test_a_run_that_is_over_is_not_asked(steps, tmp_path):
    saved = save(tmp_path, 100, whole_run(recipe(100)))
    assert schedule_phases(recipe(steps), saved) == (whole_run(recipe(100)), "")


def test_a_constant_rate_goes_on_even_from_a_run_shorter_than_the_default_warmup(tmp_path):
    short = recipe(20, "constant")
    saved = save(tmp_path, 20, whole_run(short))
    longer = recipe(800, "constant")
    chosen, note = schedule_phases(longer, saved)
    np.testing.assert_allclose(rates(longer, chosen)[20:], 1e-2, rtol=1e-6)
    assert "0.01 at step 20; it will be 0.01 at step 21, 0.01 at step 800" in note


def test_a_plateau_goes_on_and_a_decay_that_began_is_refused_with_the_checkpoint_before_it(tmp_path):
    first = recipe(100, "warmup-stable-decay")  # decays over its last fifth
    folder = tmp_path / "run"
    for at in (40, 70):
        saved = save(folder, at, whole_run(first))
    longer = recipe(200, "warmup-stable-decay")
    chosen, note = schedule_phases(longer, saved)
    assert "0.01 at step 70; it will be 0.01 at step 71" in note
    straight = rates(
        longer, whole_run(dataclasses.replace(longer, optimizer=dataclasses.replace(longer.optimizer, warmup=10)))
    )
    np.testing.assert_array_equal(rates(longer, chosen), straight)  # bit for bit, as if asked from the beginning
    saved = save(folder, 90, whole_run(first))
    message = "it would jump(.|\n)*From the checkpoint of step 70 the run goes on without a jump"
    with pytest.raises(ValueError, match=message):
        schedule_phases(longer, saved)
    with pytest.raises(ValueError, match="it would jump"):  # a shorter run, too, is another shape
        schedule_phases(recipe(95, "warmup-stable-decay"), saved)


@pytest.mark.quick
def test_a_warmup_that_does_not_fit_is_refused_and_the_default_is_a_share():
    with pytest.raises(ValueError, match="--optimizer.warmup 20 --steps 20: .*warmup must be shorter than the run"):
        check(recipe(20, warmup=20))
    assert [whole_run(recipe(steps))[0].warmup for steps in (1, 20, 400, 800, 10_000)] == [0, 2, 40, 50, 50]


@pytest.mark.by_default("warmup-cosine")
@pytest.mark.parametrize("rates_name", ["warmup-cosine", "warmup-stable-decay", "constant"])
def test_a_run_that_is_shortened_into_its_warmup_goes_on_by_the_ways_that_are_possible(rates_name, tmp_path):
    saved = save(tmp_path, 40, whole_run(recipe(800, rates_name)))
    last = 1e-2 * 40 / 51
    for asked, why in (("refuse", "it would jump"), ("reshape", "--prolong reshape is not possible here")):
        with pytest.raises(ValueError, match=why) as refused:
            schedule_phases(recipe(45, rates_name, prolong=asked), saved)
        listed = [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]]
        assert listed == ["--prolong hold", "--prolong rewarm"]
    hold, rewarm = (recipe(45, rates_name, prolong=how) for how in ("hold", "rewarm"))
    np.testing.assert_allclose(rates(hold, schedule_phases(hold, saved)[0])[39:], last, rtol=1e-6)
    warm = rates(rewarm, schedule_phases(rewarm, saved)[0])[40:]
    np.testing.assert_allclose(warm[:2], [5e-3, 1e-2], rtol=1e-6)  # few steps have a warmup too


def test_the_default_warmup_of_few_steps_is_one_where_there_are_two():
    assert [whole_run(recipe(steps))[0].warmup for steps in (1, 2, 5, 9, 10, 19)] == [0, 1, 1, 1, 1, 1]


def test_the_folder_of_a_run_is_untouched_by_a_refusal(tmp_path):
    with RunDirectory(tmp_path) as directory:
        directory.claim("name", recipe(100))
        directory.begin("name", recipe(100))
    save(tmp_path / "checkpoints", 100, whole_run(recipe(100)))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="it would jump"):
        RunDirectory(tmp_path).claim("name", recipe(200))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with RunDirectory(tmp_path) as directory:
        directory.claim("name", recipe(200, prolong="hold"))
        directory.begin("name", recipe(200, prolong="hold"))
        assert directory.read()[1].steps == 200


@pytest.mark.grid
def test_a_run_says_what_comes_before_it_goes_on(tmp_path):
    run = ["--run-dir", tmp_path / "run", "--data", write_corpus(tmp_path / "corpus"), *TINY, *LLAMA, "--simulate", 1]
    run += ["--sample-every", 0, "--validate-every", 100]
    run_here("pretrain.py", *run, "--steps", 4)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    refused = run_here("pretrain.py", *run, "--steps", 8)
    assert refused.returncode == 2 and "it would jump" in refused.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    done = run_here("pretrain.py", *run, "--steps", 8, "--prolong", "hold")
    assert "by --prolong hold it will be" in done.stdout, done.stderr
    note = [row["learning_rate"] for row in rows(tmp_path / "run")]
    assert len(note) == 8 and note[3:] == pytest.approx([note[3]] * 5) and note[3] != note[2]


def test_none_switches_clipping_off():
    assert parse(Command, ["--optimizer.clip", "None"]).run.optimizer.clip is None
    assert parse(Command, ["--optimizer.clip", "0.5"]).run.optimizer.clip == 0.5
