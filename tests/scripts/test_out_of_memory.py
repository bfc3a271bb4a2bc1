"""An out-of-memory error of a run states the requested bytes, the bytes by formulas, and smaller settings."""

import json

import jax
import pretrain
import pytest
from script_helpers import run_here, TINY, write_corpus
from support.command import parse

from eqformer import planning
from eqformer.recipes import _trainer
from eqformer.recipes._recipe import format_flag
from eqformer.recipes._setup import (
    make_abstract_plan,
    make_optimizer,
    make_train_state,
    make_training_setup,
    model_shapes,
    plan_flags,
    setting_flags,
)


ASKED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB.\nBufferAssignment stats: ..."
LARGE = "--model.layers 2 --seq 512 --batch 16 --optimizer.name adamw"


def recipe_of(words: str):
    return parse(pretrain.Command, words.split()).run


def held(words: str) -> int:
    """What plan.py's formulas say of the flags."""
    recipe = recipe_of(words)
    model = model_shapes(recipe)
    states = make_train_state(recipe, make_abstract_plan(recipe), make_optimizer(recipe, model), model)
    return planning.step_bytes(states, model, recipe.batch_shapes()).total


@pytest.mark.grid
@pytest.mark.parametrize("words", [LARGE, f"{LARGE} --mesh.pipe 2 --microbatches 4 --execution.remat full"])
def test_settings_of_smaller_setups_are_flags(words):
    recipe, memory = recipe_of(words), held(words) - 1
    smaller_setups = planning.find_smaller_setups(make_training_setup(recipe, model_shapes(recipe)), memory, "cuda")
    flags = setting_flags(smaller_setups[0].settings)
    assert flags == ("--stage-remat" if "pipe" in words else "--execution.remat full")
    assert smaller_setups[0].held == held(f"{words} {flags}") <= memory


def test_settings_are_typed_with_the_prefixes_of_their_parts():
    settings = {"optimization.moments": "bfloat16", "precision.compute": "bfloat16", "plan.stage_remat": True}
    assert setting_flags(settings) == "--optimizer.moments bfloat16 --precision.compute bfloat16 --stage-remat"


def test_choices_of_two_are_said_as_they_are_typed():
    said = "--mesh.pipe 2 --microbatches 4 --stage-remat"
    assert plan_flags(recipe_of(said)) == said
    assert format_flag("--stage-remat", False) == "--no-stage-remat"
    assert not recipe_of(f"{said} --no-stage-remat").plan.stage_remat


@pytest.mark.parametrize(
    "message, words",
    [
        pytest.param(ASKED, "requested 2.684 GB at once", marks=pytest.mark.grid),
        ("INTERNAL: a bug", "error: INTERNAL"),
    ],
)
def test_pretrain_says_it_and_ends(tmp_path, monkeypatch, message, words):
    def fail(trainer):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(_trainer.Trainer, "run", fail)
    corpus = write_corpus(tmp_path / "corpus")
    given = [*TINY, "--data", corpus, "--run-dir", tmp_path / "run", "--simulate", 1]
    found = run_here("pretrain.py", *given)
    assert found.returncode == 2 and words in found.stderr and "RESOURCE" not in found.stderr
    assert ("by formulas, a step of this run holds" in found.stderr) == (message == ASKED)


@pytest.mark.grid
def test_a_decode_that_does_not_fit_is_told_what_does():
    """Caches by hand: one layer of attention, 2^15 rows of 2^16 tokens, 2 heads of 8 channels, float32, two devices."""
    large = "--model.embed 32 --model.layers 2 --model.heads 4 --model.mlp 64 --model.kv-heads 2 --topology h100:2"
    large += " --decode --formulas --seq 65536"
    found = run_here("plan.py", *f"{large} --batch 32768 --mesh.fsdp 2".split()).stdout
    verdict, _, told = found.partition("plans for the same number of devices, by formulas:\n")
    plans = told.strip().splitlines()
    caches = json.loads(run_here("plan.py", *f"{large} --batch 32768 --mesh.fsdp 2 --json".split()).stdout)["held"][
        "caches"
    ]
    assert caches == pytest.approx(2**15 * 2**16 * 1 * (2 * 8) * 2 * 4 / 2, rel=0.1) and "does not fit" in verdict
    assert 1 <= len(plans) <= 3 and all("--cache-dtype int8" in line and "GB" in line for line in plans)
    given = plans[0].partition(":")[0]
    again = run_here("plan.py", *f"{large} --batch 32768 {given}".split()).stdout
    assert "fits in 76.4 GB" in again and "this number of devices" not in again
