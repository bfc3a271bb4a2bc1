"""A run that is out of memory says how much was asked for, what it holds by formulas, and what would hold less."""

import json

import jax
import pretrain
import pytest
from script_helpers import run_here, TINY, write_corpus
from support.command import parse
from support.flags import format_flag
from support.out_of_memory import find_smaller_runs, out_of_memory_report
from support.setup import batch_shapes, make_abstract_plan, make_optimizer, make_train_state, model_shapes, plan_flags

from eqformer import planning


ASKED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB.\nBufferAssignment stats: ..."
LARGE = "--model.layers 2 --seq 512 --batch 16 --optimizer.name adamw"


def recipe_of(words: str):
    return parse(pretrain.Command, words.split()).run


def held(words: str) -> int:
    """What plan.py's formulas say of the flags."""
    recipe = recipe_of(words)
    model = model_shapes(recipe)
    states = make_train_state(recipe, make_abstract_plan(recipe), make_optimizer(recipe, model), model)
    return planning.step_bytes(states, model, batch_shapes(recipe)).total


@pytest.mark.grid
def test_what_is_offered_fits_and_is_what_its_flags_hold():
    recipe, all_bytes = recipe_of(LARGE), held(LARGE)
    memory = all_bytes * 9 // 10
    offered = find_smaller_runs(recipe, model_shapes(recipe), memory, "cuda")
    assert 2 <= len(offered) <= 3 and all(smaller_run.held <= memory < all_bytes for smaller_run in offered)
    assert offered[0].held == held(f"{LARGE} {offered[0].flags}")
    assert find_smaller_runs(recipe, model_shapes(recipe), 10**6, "cuda") == []  # the state alone is larger
    in_stages = f"{LARGE} --mesh.pipe 2 --microbatches 4 --execution.remat full"
    staged = recipe_of(in_stages)
    (first, *_) = find_smaller_runs(staged, model_shapes(staged), held(in_stages) - 1, "cuda")
    assert first.flags == "--stage-remat" and first.held == held(f"{in_stages} --stage-remat")
    recomputing = f"{LARGE} --execution.remat full"
    recipe, memory = recipe_of(recomputing), held(recomputing) - 1
    of_a_gpu, of_a_cpu = (
        find_smaller_runs(recipe, model_shapes(recipe), memory, platform)[0] for platform in ("cuda", "cpu")
    )
    assert of_a_gpu.flags == "--execution.remat full_on_host" and of_a_gpu.held == held(f"{LARGE} {of_a_gpu.flags}")
    assert "host" not in of_a_cpu.flags  # whose memory is its own


def test_choices_of_two_are_said_as_they_are_typed():
    said = "--mesh.pipe 2 --microbatches 4 --stage-remat"
    assert plan_flags(recipe_of(said)) == said
    assert format_flag("--stage-remat", False) == "--no-stage-remat"
    assert not recipe_of(f"{said} --no-stage-remat").plan.stage_remat


@pytest.mark.grid
def test_an_error_of_a_full_memory_is_told_with_plans():
    recipe = recipe_of(f"{LARGE} --mesh.fsdp 2")
    report = out_of_memory_report(jax.errors.JaxRuntimeError(ASKED), recipe, model_shapes(recipe))
    assert report is not None
    first, holds, heading, *plans = report.splitlines()
    assert first == "a device (cpu) is out of memory: 2.684 GB were asked for at once"
    assert f"holds {planning.gigabytes(held(f'{LARGE} --mesh.fsdp 2'))} on each: parameters" in holds
    assert heading.startswith("by formulas it would hold no more than") and 1 <= len(plans) <= 3
    assert plans[0].startswith("  --mesh.fsdp 2") and all(line.endswith(" GB") for line in plans)
    assert out_of_memory_report(jax.errors.JaxRuntimeError("INTERNAL: a bug"), recipe, model_shapes(recipe)) is None


@pytest.mark.parametrize(
    "message, words",
    [
        pytest.param(ASKED, "is out of memory: 2.684 GB", marks=pytest.mark.grid),
        ("INTERNAL: a bug", "error: INTERNAL"),
    ],
)
def test_pretrain_says_it_and_ends(tmp_path, monkeypatch, message, words):
    def fail(trainer):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(pretrain.Trainer, "run", fail)
    corpus = write_corpus(tmp_path / "corpus")
    given = [*TINY, "--data", corpus, "--run-dir", tmp_path / "run", "--simulate", 1]
    found = run_here("pretrain.py", *given)
    assert found.returncode == 2 and words in found.stderr and "RESOURCE" not in found.stderr
    assert ("by formulas this run holds" in found.stderr) == (message == ASKED)


def test_a_decode_that_does_not_fit_is_told_what_does():
    """Caches by hand: 16,384 rows of 65,536 tokens, two key heads of 8 channels, two layers, in float32, on two."""
    large = "--model.embed 32 --model.layers 2 --model.heads 4 --model.mlp 64 --model.kv-heads 2 --topology h100:2"
    large += " --decode --formulas --seq 65536"
    found = run_here("plan.py", *f"{large} --batch 16384 --mesh.fsdp 2".split()).stdout
    verdict, _, told = found.partition("by formulas, as many devices would hold it by\n")
    plans = told.strip().splitlines()
    caches = json.loads(run_here("plan.py", *f"{large} --batch 16384 --mesh.fsdp 2 --json".split()).stdout)["held"][
        "caches"
    ]
    assert caches == pytest.approx(2**14 * 2**16 * 2 * (2 * 8) * 2 * 4 / 2, rel=0.1) and "does not fit" in verdict
    assert 1 <= len(plans) <= 3 and all("--cache-dtype int8" in line and "GB" in line for line in plans)
    given = plans[0].partition(":")[0]
    again = run_here("plan.py", *f"{large} --batch 16384 {given}".split()).stdout
    assert "fits, of 76.4 GB" in again and "as many devices" not in again
