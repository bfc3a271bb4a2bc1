"""Runs that start from the weights of another run."""

import json

import numpy as np
import pytest
from script_helpers import learn_nothing, losses, rows, run_here, saved_arrays, TINY, write_corpus

from eqformer import training


SMALL = [*TINY, "--batch", "8", "--mesh.replica", "8", "--validate-every", "6", "--sample-every", "0"]
ONE = ["--simulate", "1"]


def train(run_dir, *more):
    return run_here("pretrain.py", "--run-dir", run_dir, *more)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    more = "--recipe", "gpt2-byte-1m", "--profile", "2:3", "--metrics.gradient-norms"
    done = train(folder / "run", "--data", write_corpus(folder / "corpus"), *more, *SMALL)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def plain_source(tmp_path_factory):
    """A run on one device, for what is refused before any device is used."""
    folder = tmp_path_factory.mktemp("plain")
    flags = [*TINY, "--recipe", "gpt2-byte-1m", "--validate-every", "6", "--sample-every", "0", *ONE]
    with pytest.MonkeyPatch.context() as monkeypatch:
        learn_nothing(monkeypatch)
        done = train(folder / "run", "--data", write_corpus(folder / "corpus"), *flags)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def arrays(run_dir, step, part):
    """The arrays of a part of a checkpoint, by name."""
    return {name: np.asarray(x) for name, x in saved_arrays(run_dir, step).items() if name.startswith(part)}


def fork(source, run_dir, *more):
    done = train(run_dir, "--from-run", source, *more)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.grid
def test_a_trace_names_modules_and_collectives_and_metrics_have_time_and_memory(source):
    (trace,) = (source / "profile").rglob("*.xplane.pb")
    assert b"gradients over replica" in trace.read_bytes()
    assert b"blocks/sublayers[0]/layer/query/" in trace.read_bytes()
    row = rows(source)[-1]
    norms = [value for name, value in row.items() if name.startswith("grad_norm/")]
    assert len(norms) == 5 and np.linalg.norm(norms) == pytest.approx(row["grad_norm"])
    assert row["tokens"] == 6 * 8 * 32 and 0 < row["step_seconds"] < 60 and row["peak_bytes"] > 1e8


# A learning rate of nearly nothing leaves what a run started from.
STILL = "--optimizer.rates constant --optimizer.warmup 0 --optimizer.learning-rate 1e-30 --optimizer.weight-decay 0 "
STILL = f"{STILL} --steps 1 --checkpoint-every 1".split()


@pytest.mark.grid
def test_a_fork_has_the_weights_of_the_step_that_it_names(source, tmp_path):
    assert training.Checkpointer(source / "checkpoints").steps == [3, 6]
    for step, more in ((6, ()), (3, ("--from-step", 3))):
        done = fork(source, tmp_path / f"of {step}", *STILL, *more)
        assert f"starts from {source}" in done.stdout
        got, wanted = arrays(tmp_path / f"of {step}", 1, "model"), arrays(source, step, "model")
        other = arrays(source, 9 - step, "model")
        assert got.keys() == wanted.keys()
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted)
        assert not all(np.array_equal(got[name], other[name]) for name in wanted)  # the control


@pytest.mark.grid  # tests/training shows that nothing else changes, and that killed runs do the same
def test_a_run_goes_back_at_a_spike_and_leaves_batches_out(source, tmp_path):
    watched = "--spikes.factor 1.0001 --spikes.window 1 --spikes.max-rollbacks 2".split()
    wild = "--steps 12 --optimizer.learning-rate 0.3 --checkpoint-every 1".split()
    done = train(tmp_path / "run", "--from-run", source, *wild, *watched)
    assert done.returncode == 2 and "the run has gone back 2 of at most 2 times" in done.stderr
    spike = int(done.stdout.split(": the loss is ")[0].split()[-1])
    assert spike > 1 and "The run goes back to its last checkpoint" in done.stdout
    saved = training.Checkpointer(tmp_path / "run" / "checkpoints")
    latest = saved.steps[-1]
    assert latest >= spike - 1
    left_out = [last - first + 1 for first, last in saved.metadata()["spikes"]["left_out"]]
    assert saved.metadata()["data"]["example"] == 8 * (latest + sum(left_out))
    assert len(losses(tmp_path / "run")) >= latest  # each step once


@pytest.mark.grid  # tests/training names steps and modules by the same callback
def test_numbers_that_are_not_finite_are_traced_to_their_module(source, tmp_path):
    wild = "--optimizer.rates constant --optimizer.learning-rate 1e30 --optimizer.warmup 0 --steps 4".split()
    done = train(tmp_path / "run", "--from-run", source, *wild, "--debug-nans")
    assert done.returncode == 2 and "error: step 2: the loss is" in done.stderr
    assert (
        "in the forward pass of stacks[0].blocks" in done.stderr
        and "The model is unchanged since step 1" in done.stderr
    )


@pytest.mark.grid
def test_a_fork_takes_the_optimizers_memory_where_it_is_asked_to(source, tmp_path):
    kept = "optimizer_state"
    still = [*STILL, "--from-optimizer"]
    with_memory, without = tmp_path / "with", tmp_path / "without"
    fork(source, with_memory, *still)
    fork(source, without, *STILL)
    before = arrays(source, 6, kept)
    distance = lambda run: sum(np.abs(x - before[name]).sum() for name, x in arrays(run, 1, kept).items())
    # One step of Adam moves its memory by a tenth of the way to the gradient.
    assert distance(with_memory) < 0.5 * distance(without)
    assert losses(with_memory) == losses(without)
    recipe = json.loads((with_memory / "recipe.json").read_text())["recipe"]
    assert recipe["from_run"] == str(source) and recipe["model"]["kind"] == "GPT2Config"


@pytest.mark.grid
def test_low_rank_changes_start_from_a_run_and_change_nothing_at_first(source, tmp_path):
    fork(source, tmp_path / "plain", *STILL)
    fork(source, tmp_path / "factors", *STILL, "--lora.rank", "2")
    np.testing.assert_allclose(losses(tmp_path / "factors"), losses(tmp_path / "plain"), rtol=1e-5)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--from-run {source} --from-step 5", "the run has checkpoints of these steps: 3, 6"),
        ("--from-run {source} --model.embed 64", "the recipe's model has other arrays than that run's model"),
        ("--from-run {source}/nothing", "there is no run (no recipe.json)"),
        (
            "--from-run {source} --from-optimizer --optimizer.name sgd",
            "optimizer state has a different structure; leave out --opt",
        ),
        ("--from-step 5", "these flags choose parts of an earlier run; give --from-run DIR too"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_anything_is_written(flags, message, plain_source, tmp_path):
    done = train(tmp_path / "run", *flags.format(source=plain_source).split(), *ONE)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "run").exists()


def test_a_run_does_not_start_from_itself(plain_source):
    done = train(plain_source, "--from-run", plain_source, "--steps", "9", *ONE)
    assert done.returncode == 2, done.stdout
