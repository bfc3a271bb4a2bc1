"""Training on rewards by a command: what is refused, and a run that goes on bit for bit and is written out."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import reinforce
from script_helpers import rows, run_here, saved_arrays, stop_at
from text_cases import published_folder, TEMPLATE

import eqformer
from eqformer import training
from eqformer.recipes import Metrics, published_recipe, Recipe, RunDirectory, setup, Text, texts


REWARDS = """
def high(prompts, completions, letter):
    return [sum(ord(character) > 127 for character in text) / 8 for text in completions]

def broken(prompts, completions, letter):
    return {}["answer"]

def infinite(prompts, completions, letter):
    return [float("nan")] * len(completions)

def short(prompts, completions, letter):
    return [0.0]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with a small published chat model, prompts, and functions of rewards."""
    folder = tmp_path_factory.mktemp("rewards")
    published_folder(folder / "M", chat_template__jinja=TEMPLATE)
    prompts = [{"prompt": [{"role": "user", "content": letter}], "letter": letter} for letter in "abc"]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def command_of(inputs: Path, recipe_fields: Any = None) -> reinforce.Command:
    options: dict[str, Any] = {"batch": 8, "data": inputs / "prompts.jsonl"} | (recipe_fields or {})
    recipe = published_recipe(inputs / "M", **options)
    return reinforce.Command("M", recipe, reward=f"{inputs}/rewards.py:high", group=4, tokens=8)


@pytest.mark.parametrize(
    "recipe_fields, fields, message",
    [
        ({}, {"reward": None}, "--reward: there is none; give FILE.py:NAME"),
        ({"data": None}, {}, "--data: there are no prompts; give --data PROMPTS.jsonl"),
        ({"published": None}, {}, "--model: rewards need a model that is sometimes right; give --model"),
        ({"loss": "dpo"}, {}, "--loss dpo: training on rewards has no such choice; leave it out"),
        ({"beta": 0.04}, {}, "--beta 0.04: training on rewards has no such choice; give --kl-weight"),
        ({"evaluate_tasks": ("gsm8k", "a")}, {}, "--evaluate-tasks gsm8k a: training on rewards has no such choice"),
        (
            {"validate_every": 5},
            {},
            "--validate-every 5: training on rewards has no such choice; leave it out, or give --held",
        ),
        ({"prompt": "Hi"}, {}, "--prompt Hi: training on rewards has no such choice"),
        ({"text": Text(field="question")}, {}, "--text.field question: training on rewards has no such choice"),
        ({"batch": 6}, {}, "--batch 6 --group 4: a step has whole groups of at least 2 completions"),
        ({}, {"group": 1}, "--batch 8 --group 1: a step has whole groups"),
        (
            {"checkpoint_every": 5},
            {"updates": 2},
            "--checkpoint-every 5 --updates 2: a run goes on with new completions",
        ),
        (
            {"steps": 5},
            {"updates": 2},
            "--steps 5 --updates 2: a run goes on with new completions, so it is saved after",
        ),
        ({}, {"updates": 0}, "--steps 800 --updates 0: "),
    ],
)
def test_flags_that_do_not_fit_are_refused(recipe_fields, fields, message, inputs):
    reinforce.check_flags(command_of(inputs))  # the control
    command = command_of(inputs, recipe_fields)
    with pytest.raises(ValueError, match=f"^{message}"):
        reinforce.check_flags(dataclasses.replace(command, **fields))


def test_flags_of_texts_are_those_that_a_run_on_rewards_does_not_read(inputs, tmp_path):
    recipe = command_of(inputs).run
    read = Text(tokenizer=inputs / "tokenizer.json"), training.Optimization(clip=2.0), Metrics(tensorboard=True)
    fields = {"sample_every": 3, "keep": 1, "plan": dataclasses.replace(recipe.plan, microbatches=2)}
    fields |= dict(zip(("text", "optimizer", "metrics"), read))
    reinforce.check_flags_of_texts(dataclasses.replace(recipe, **fields))
    recipe_of_chats = with_answers(recipe, tmp_path)
    reinforce.check_flags_of_texts(texts.for_chats(recipe_of_chats))
    reinforce.check_flags_of_texts(dataclasses.replace(recipe, validate_every=5), has_held_out=True)
    # Flags of a run that this run starts from stay without effect, unless they change the step.
    source, inherited = RunDirectory(tmp_path / "source"), {"evaluate_tasks": ("gsm8k",), "validate_every": 5}
    source.path.mkdir()
    source.begin("M", dataclasses.replace(recipe_of_chats, **inherited, loss="dpo"))
    start = texts.for_chats(dataclasses.replace(recipe_of_chats, **inherited, from_run=source.path))
    reinforce.check_flags_of_texts(start)
    for change, flag in (({"validate_every": 6}, "--validate-every 6"), ({"loss": "dpo"}, "--loss dpo")):
        with pytest.raises(ValueError, match=f"^{flag}: "):
            reinforce.check_flags_of_texts(dataclasses.replace(start, **change))
    with pytest.raises(ValueError, match=r"leave it out, or give --loss next-token if the run of --from-run has it"):
        reinforce.check_flags_of_texts(dataclasses.replace(start, loss="dpo"))


def with_answers(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with prompts whose rows also have an answer, which are read as chats are."""
    message = lambda role: [{"role": role, "content": "a"}]
    file = folder / "answered.jsonl"
    file.write_text(json.dumps({"prompt": message("user"), "completion": message("assistant")}))
    return dataclasses.replace(recipe, data=file)


def test_a_run_goes_on_with_the_same_rewards_alone(inputs, tmp_path):
    command, directory = command_of(inputs), RunDirectory(tmp_path / "run")
    settings = reinforce.list_settings(command, [{"prompt": "a"}])

    def save(step: int, **metadata: Any) -> None:
        with directory.checkpointer() as checkpointer:
            checkpointer.save({"weight": np.zeros(1)}, step, metadata)

    directory.path.mkdir()
    directory.begin("M", command.run)
    save(1, rewards=settings)
    reinforce.check_same_settings(directory, settings)
    for other in (
        dataclasses.replace(command, group=2),
        dataclasses.replace(command, reward=f"{inputs}/rewards.py:short"),
    ):
        with pytest.raises(
            ValueError, match=r"differs in\n  --(group: 4 -> 2|reward: high of .* -> short of .*)\nGive"
        ):
            reinforce.check_same_settings(directory, reinforce.list_settings(other, [{"prompt": "a"}]))
    with pytest.raises(ValueError, match=r"differs in\n  --data: 1 rows"):
        reinforce.check_same_settings(directory, reinforce.list_settings(command, [{"prompt": "b"}]))
    save(2)
    with pytest.raises(ValueError, match=r"learns from no rewards; give another folder, and --from-run"):
        reinforce.check_same_settings(directory, settings)


def open_run(command: reinforce.Command, folder: Path, prompts: list[dict[str, Any]]) -> reinforce.RewardRun:
    plan, shapes = setup.make_plan(command.run, jax.devices()[:1]), setup.model_shapes(command.run)
    return reinforce.RewardRun(command, RunDirectory(folder), shapes, plan, prompts, lambda *columns: [], {})


def test_prompts_that_exceed_a_row_are_refused_before_weights_are_read(inputs, tmp_path):
    run_of = lambda seq: open_run(command_of(inputs, {"seq": seq}), tmp_path / "run", [{"prompt": "a" * 20}])
    with pytest.raises(
        ValueError, match="^--seq 16 --tokens 8: the longest prompt and its completion need a row of 32"
    ):
        run_of(16)
    run = run_of(32)
    assert run.rollouts.seq == 32
    prompts = f"2 prompts a step of {inputs}/prompts.jsonl, 4 completions each"
    assert run._opening(3).endswith(f", goes on at step 3 in {tmp_path / 'run'}; {prompts}")


def test_held_out_prompts_have_the_fields_of_the_others(inputs, tmp_path):
    file = tmp_path / "held.jsonl"
    command = dataclasses.replace(command_of(inputs), held_out=file)
    file.write_text('{"prompt": "a", "letter": "x"}')
    rows = [{"prompt": "b", "letter": "y"}]
    assert reinforce.read_held_out(command, rows) == [{"prompt": "a", "letter": "x"}]
    assert reinforce.list_settings(command, rows) == reinforce.list_settings(command_of(inputs), rows)
    for line, message in (('{"prompt": "a"}', r"its rows have \['prompt'\]"), ('{"text": "a"}', "read_prompts")):
        file.write_text(line)
        with pytest.raises(ValueError, match=f"^--held-out {file}: {message}"):
            reinforce.read_held_out(command, rows)


@pytest.mark.parametrize(
    "policy_loss, flag, scales", [("grpo", None, True), ("dr_grpo", None, False), ("dr_grpo", True, True)]
)
def test_dr_grpo_does_not_divide_advantages_by_standard_deviations(policy_loss, flag, scales, inputs, tmp_path):
    command = dataclasses.replace(command_of(inputs), policy_loss=policy_loss, scale_rewards=flag)
    assert open_run(command, tmp_path / "run", [{"prompt": "a"}]).rollouts._scale is scales
    assert reinforce.list_settings(command, [])["--scale-rewards"] is scales


def flags(inputs: Path, reward: str = "high") -> list[Any]:
    options = "--batch 8 --group 4 --tokens 8 --seq 32 --steps 8 --log-every 1 --checkpoint-every 8 --sample-every 4"
    options += " --updates 2 --kl-weight 0.01 --optimizer.learning-rate 1e-2 --optimizer.warmup 0 --simulate 1"
    options += " --validate-every 4"
    paths = ["--model", inputs / "M", "--data", inputs / "prompts.jsonl", "--reward", f"{inputs}/rewards.py:{reward}"]
    return [*paths, "--held-out", inputs / "prompts.jsonl", *options.split()]


@pytest.mark.grid
@pytest.mark.parametrize(
    "reward, message",
    [
        ("broken", r"it raised KeyError: 'answer'; correct the function"),
        ("infinite", r"is nan; return finite numbers"),
        ("short", r"it returned 1 rewards for 8 completions; return one for each"),
        ("missing", r"has no function 'missing', which would give the reward; it has broken, high, infinite, short"),
    ],
)
def test_a_reward_that_fails_at_first_leaves_no_folder(reward, message, inputs, tmp_path):
    done = run_here("reinforce.py", *flags(inputs, reward), "--run-dir", tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr and "--reward" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.grid
def test_a_run_raises_its_rewards_goes_on_and_is_written_out(inputs, tmp_path, monkeypatch):
    done = run_here("reinforce.py", *flags(inputs), "--run-dir", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    opening, sampling, *_ = done.stdout.splitlines()
    assert "parameters, all trained, starts in" in opening and sampling == "sampling 8 completions for step 1 ..."
    assert "step 8/8  reward " in done.stdout and "ETA" in done.stdout and "(reward " in done.stdout
    whole = rows(tmp_path / "whole", "reward")
    assert whole[-1]["reward"] > whole[0]["reward"] + 0.2 and whole[0]["kl"] < 1e-6 < 1e-3 < whole[-1]["kl"]
    assert whole[0].keys() >= {"completion_tokens", "truncated", "clip_fraction", "entropy", "tokens_per_second"}
    held_out = rows(tmp_path / "whole", "validation_reward")
    assert [row["step"] for row in held_out] == [0, 4, 8] and "held-out" in done.stdout
    assert held_out[-1]["validation_reward"] > held_out[0]["validation_reward"]
    assert {path.name for path in (tmp_path / "whole").iterdir()} >= {"rewards.png", "samples.txt", "recipe.json"}

    with monkeypatch.context() as patched:
        stop_at(patched, 3)
        stopped = run_here("reinforce.py", *flags(inputs), "--run-dir", tmp_path / "stopped")
    assert "stopped at step 4; the checkpoint is saved" in stopped.stdout  # after both updates on its completions
    assert (tmp_path / "stopped" / "rewards.png").exists()
    halfway = saved_arrays(tmp_path / "stopped", 4)
    assert "goes on at step 4" in run_here("reinforce.py", *flags(inputs), "--run-dir", tmp_path / "stopped").stdout
    expected, resumed = (saved_arrays(tmp_path / name, 8) for name in ("whole", "stopped"))
    assert all(np.array_equal(expected[name], resumed[name]) for name in expected)
    assert not all(np.array_equal(expected[name], halfway[name]) for name in expected)  # the control
    columns = "loss", "reward", "kl", "completion_tokens"
    pairs = zip(whole, rows(tmp_path / "stopped", "reward"), strict=True)
    assert all(row[name] == other[name] for row, other in pairs for name in columns)

    refused = run_here("pretrain.py", *flags(inputs)[:4], "--run-dir", tmp_path / "whole", "--simulate", 1)
    assert refused.returncode == 2 and "--run-dir" in refused.stderr
    assert run_here("convert.py", tmp_path / "whole", tmp_path / "published").returncode == 0
    answers = [eqformer.load(tmp_path / name).generate("a", max_new_tokens=8) for name in ("whole", "published")]
    assert answers[0] == answers[1] != eqformer.load(inputs / "M").generate("a", max_new_tokens=8)


@pytest.mark.grid
def test_the_command_of_the_page_on_training_runs(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "M").symlink_to(inputs / "M")
    (tmp_path / "prompts.jsonl").write_bytes((inputs / "prompts.jsonl").read_bytes())
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (reward,) = re.findall(r"^def share_of_digits.*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^python scripts/reinforce\.py (.*?)\n```", page, re.DOTALL | re.MULTILINE)
    assert "--steps 100 " in command
    words = shlex.split(command.replace("\\\n", " ").replace("--steps 100", "--steps 1"))
    missing = run_here("reinforce.py", *words, "--simulate", 1)
    assert missing.returncode == 2 and "reward.py" in missing.stderr  # the control
    (tmp_path / "reward.py").write_text(reward)
    done = run_here("reinforce.py", *words, "--simulate", 1)
    assert done.returncode == 0, done.stderr
    assert "sampling 32 completions" in done.stdout and rows(tmp_path / "runs" / "rewarded", "reward")
