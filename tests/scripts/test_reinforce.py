"""`reinforce.py`: reward functions that fail, a bit-for-bit resume, and the conversion of the run."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from script_helpers import rows, run_here, saved_arrays, stop_at
from text_cases import published_folder, TEMPLATE

import eqformer


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


def flags(inputs: Path, reward: str = "high") -> list[Any]:
    options = "--batch 8 --group 4 --tokens 8 --seq 32 --steps 8 --log-every 1 --checkpoint-every 8 --sample-every 4"
    options += " --updates 2 --kl-weight 0.01 --optimizer.learning-rate 1e-2 --optimizer.warmup 0 --simulate 1"
    options += " --validate-every 4"
    paths = ["--model", inputs / "M", "--data", inputs / "prompts.jsonl", "--reward", f"{inputs}/rewards.py:{reward}"]
    return [*paths, "--held-out", inputs / "prompts.jsonl", *options.split()]


def test_a_run_without_a_reward_is_refused(inputs, tmp_path):
    without = [word for word in flags(inputs) if "rewards.py" not in str(word) and word != "--reward"]
    refused = run_here("reinforce.py", *without, "--run-dir", tmp_path / "run")
    assert refused.returncode == 2 and "--reward: there is no reward function; give FILE.py:NAME" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.grid
@pytest.mark.parametrize(
    "reward, message",
    [
        ("broken", r"it raised KeyError: 'answer'; correct the function"),
        ("infinite", r"is nan; return finite numbers"),
        ("short", r"it returned 1 rewards for 8 completions; return one for each"),
        ("missing", "no function 'missing' that returns the reward; the file defines broken, high, infinite, short"),
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
    opening, _, sampling, *_ = done.stdout.splitlines()  # The line between names the optimizers.
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
    reward, *_ = re.findall(r"^def share_of_digits.*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^python scripts/reinforce\.py (.*?)\n```", page, re.DOTALL | re.MULTILINE)
    assert "--steps 100 " in command
    words = shlex.split(command.replace("\\\n", " ").replace("--steps 100", "--steps 1"))
    missing = run_here("reinforce.py", *words, "--simulate", 1)
    assert missing.returncode == 2 and "reward.py" in missing.stderr  # the control
    (tmp_path / "reward.py").write_text(reward)
    done = run_here("reinforce.py", *words, "--simulate", 1)
    assert done.returncode == 0, done.stderr
    assert "sampling 32 completions" in done.stdout and rows(tmp_path / "runs" / "rewarded", "reward")
