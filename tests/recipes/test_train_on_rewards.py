"""`train_on_rewards`: refused arguments, and a resume that needs the same reward settings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from text_cases import published_folder, TEMPLATE

import eqformer
from eqformer import training
from eqformer.recipes import (
    Metrics,
    published_recipe,
    Recipe,
    RewardOptions,
    RunDirectory,
    Screen,
    setup,
    Text,
    texts,
    train_on_rewards,
)
from eqformer.recipes._reward_trainer import RewardTrainer
from eqformer.recipes._rewards import (
    check_flags,
    check_flags_of_texts,
    check_same_settings,
    list_settings,
    read_subject,
    Subject,
)


OPTIONS = RewardOptions(group=4, tokens=8)
ROWS = [{"prompt": [{"role": "user", "content": letter}], "letter": letter} for letter in "abc"]
REWARDS = """
def high(prompts, completions, letter):
    return [sum(ord(character) > 127 for character in text) / 8 for text in completions]

def short(prompts, completions, letter):
    return [0.0]
"""


def high(prompts, completions, letter):
    """Reward characters that are no ASCII, as the function of the file does."""
    return [sum(ord(character) > 127 for character in text) / 8 for text in completions]


def low(prompts, completions, letter):
    return [-reward for reward in high(prompts, completions, letter)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with a small published chat model, prompts, and functions of rewards."""
    folder = tmp_path_factory.mktemp("rewards")
    published_folder(folder / "M", chat_template__jinja=TEMPLATE)
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def recipe_of(inputs: Path, **fields: Any) -> Recipe:
    options: dict[str, Any] = {"batch": 8, "data": inputs / "prompts.jsonl"} | fields
    return published_recipe(inputs / "M", **options)


@pytest.mark.parametrize(
    "recipe_fields, fields, message",
    [
        ({"data": None}, {}, "--data: there are no prompts; give --data PROMPTS.jsonl"),
        (
            {"published": None},
            {},
            "--model: training on rewards needs a trained model, whose completions sometimes earn a reward; give",
        ),
        ({"loss": "dpo"}, {}, "--loss dpo: this flag has no effect on training on rewards; leave it out"),
        ({"beta": 0.04}, {}, "--beta 0.04: this flag has no effect on training on rewards; give --kl-weight"),
        (
            {"evaluate_tasks": ("gsm8k", "a")},
            {},
            "--evaluate-tasks gsm8k a: this flag has no effect on training on rewards",
        ),
        (
            {"validate_every": 5},
            {},
            "--validate-every 5: this flag has no effect on training on rewards; leave it out, or give --held",
        ),
        ({"prompt": "Hi"}, {}, "--prompt Hi: this flag has no effect on training on rewards"),
        ({"text": Text(field="question")}, {}, "--text.field question: this flag has no effect on training on rewards"),
        ({"batch": 6}, {}, "--batch 6 --group 4: a step has whole groups of at least 2 completions"),
        ({}, {"group": 1}, "--batch 8 --group 1: a step has whole groups"),
        (
            {"checkpoint_every": 5},
            {"updates": 2},
            "--checkpoint-every 5 --updates 2: a resumed run begins with new completions",
        ),
        (
            {"steps": 5},
            {"updates": 2},
            "--steps 5 --updates 2: a resumed run begins with new completions, so a run is saved only after",
        ),
        ({}, {"updates": 0}, "--steps 800 --updates 0: "),
    ],
)
def test_choices_that_do_not_fit_are_refused(recipe_fields, fields, message, inputs):
    recipe = recipe_of(inputs)
    check_flags(recipe, OPTIONS)  # the control
    changed = dataclasses.replace(recipe, **recipe_fields)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_flags(changed, dataclasses.replace(OPTIONS, **fields))


def test_the_call_refuses_before_it_writes(inputs, tmp_path):
    folder = tmp_path / "run"
    cases: Any = (
        (recipe_of(inputs), OPTIONS, {"rows": ROWS}, r"^--data \S+prompts.jsonl: the call has rows of prompts, too"),
        (recipe_of(inputs), dataclasses.replace(OPTIONS, temperature=0.0), {}, r"^--temperature 0.0: Rollouts\("),
        (recipe_of(inputs), dataclasses.replace(OPTIONS, resample=-1), {}, r"^--resample -1: Rollouts\("),
        (recipe_of(inputs, data=None), OPTIONS, {"rows": [{"letter": "a"}]}, r"Rollouts\(rows=\[...\]\): each row"),
        (
            recipe_of(inputs),
            OPTIONS,
            {"held_out": [{"prompt": "a"}]},
            r"^--held-out: the held-out rows have the fields \['prompt'\]",
        ),
    )
    for recipe, options, more, message in cases:
        with pytest.raises(ValueError, match=message):
            train_on_rewards(
                recipe, folder, high, options, **more, devices=jax.devices()[:1], screen=Screen(silent=True)
            )
    assert not folder.exists()


def test_flags_of_texts_are_those_that_a_run_on_rewards_does_not_read(inputs, tmp_path):
    recipe = recipe_of(inputs)
    choices = Text(tokenizer=inputs / "tokenizer.json"), training.Optimization(clip=2.0), Metrics(tensorboard=True)
    fields = {"sample_every": 3, "keep": 1, "plan": dataclasses.replace(recipe.plan, microbatches=2)}
    fields |= {"weights": "quantized"}
    fields |= dict(zip(("text", "optimizer", "metrics"), choices))
    check_flags_of_texts(dataclasses.replace(recipe, **fields))
    recipe_of_chats = with_answers(recipe, tmp_path)
    check_flags_of_texts(texts.for_chats(recipe_of_chats))
    check_flags_of_texts(dataclasses.replace(recipe, validate_every=5), has_held_out=True)
    # Flags of a run that this run starts from stay without effect, unless they change the step.
    source, inherited = RunDirectory(tmp_path / "source"), {"evaluate_tasks": ("gsm8k",), "validate_every": 5}
    source.path.mkdir()
    source.begin("M", dataclasses.replace(recipe_of_chats, **inherited, loss="dpo"))
    start = texts.for_chats(dataclasses.replace(recipe_of_chats, **inherited, from_run=source.path))
    check_flags_of_texts(start)
    for change, flag in (({"validate_every": 6}, "--validate-every 6"), ({"loss": "dpo"}, "--loss dpo")):
        with pytest.raises(ValueError, match=f"^{flag}: "):
            check_flags_of_texts(dataclasses.replace(start, **change))
    with pytest.raises(ValueError, match=r"leave it out, or give --loss next-token if the run of --from-run has it"):
        check_flags_of_texts(dataclasses.replace(start, loss="dpo"))


def with_answers(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with prompts whose rows also have an answer, which are read as chats are."""
    message = lambda role: [{"role": role, "content": "a"}]
    file = folder / "answered.jsonl"
    file.write_text(json.dumps({"prompt": message("user"), "completion": message("assistant")}))
    return dataclasses.replace(recipe, data=file)


def test_a_run_goes_on_with_the_same_rewards_alone(inputs, tmp_path):
    directory, reward, rows = RunDirectory(tmp_path / "run"), f"{inputs}/rewards.py:high", [{"prompt": "a"}]
    settings = list_settings(OPTIONS, reward, rows)

    def save(step: int, **metadata: Any) -> None:
        with directory.checkpointer() as checkpointer:
            checkpointer.save({"weight": np.zeros(1)}, step, metadata)

    directory.path.mkdir()
    directory.begin("M", recipe_of(inputs))
    save(1, rewards=settings)
    check_same_settings(directory, settings)
    for options, other in ((dataclasses.replace(OPTIONS, group=2), reward), (OPTIONS, f"{inputs}/rewards.py:short")):
        with pytest.raises(
            ValueError, match=r"differs in\n  --(group: 4 -> 2|reward: high of .* -> short of .*)\nGive"
        ):
            check_same_settings(directory, list_settings(options, other, rows))
    with pytest.raises(ValueError, match=r"differs in\n  --data: 1 rows"):
        check_same_settings(directory, list_settings(OPTIONS, reward, [{"prompt": "b"}]))
    save(2)
    with pytest.raises(ValueError, match=r"does not learn from rewards; give another folder, and --from-run"):
        check_same_settings(directory, settings)


def test_functions_in_memory_are_told_apart_by_their_source():
    describe = lambda reward: list_settings(OPTIONS, reward, ROWS)["--reward"]
    assert describe(high).startswith("high with the SHA-256 ") and describe(high) != describe(low)
    typed: dict[str, Any] = {}
    exec("def high(prompts, completions, letter): return []", typed)
    assert describe(typed["high"]) == "high"
    odd = [{"prompt": "a", "check": object()}]  # Neither JSON nor the same text in another process.
    assert list_settings(OPTIONS, high, odd) == list_settings(OPTIONS, high, [{"prompt": "a", "check": object()}])
    assert list_settings(OPTIONS, high, odd) != list_settings(OPTIONS, high, [{"prompt": "b", "check": object()}])


def open_trainer(recipe: Recipe, folder: Path, rows: Any, options: RewardOptions = OPTIONS) -> RewardTrainer:
    plan, shapes = setup.make_plan(recipe, jax.devices()[:1]), setup.model_shapes(recipe)
    subject, screen = Subject(lambda *columns: [], rows, None, "", {}), Screen(silent=True)
    return RewardTrainer("M", recipe, options, subject, shapes, plan, RunDirectory(folder), screen)


def test_prompts_that_exceed_a_row_are_refused_before_weights_are_read(inputs, tmp_path):
    trainer_of = lambda seq: open_trainer(recipe_of(inputs, seq=seq), tmp_path / "run", [{"prompt": "a" * 20}])
    with pytest.raises(
        ValueError, match="^--seq 16 --tokens 8: the longest prompt and its completion need a row of 32"
    ):
        trainer_of(16)
    trainer = trainer_of(32)
    assert trainer.rollouts.seq == 32
    prompts = f"2 prompts a step of {inputs}/prompts.jsonl, 4 completions each"
    assert trainer._opening(3).endswith(f", goes on at step 3 in {tmp_path / 'run'}; {prompts}")


def test_held_out_prompts_have_the_fields_of_the_others(inputs, tmp_path):
    file, rows = tmp_path / "held.jsonl", [{"prompt": "b", "letter": "y"}]
    read_rows = lambda: read_subject(recipe_of(inputs), OPTIONS, high, rows, file)
    file.write_text('{"prompt": "a", "letter": "x"}')
    assert read_rows().held_out == [{"prompt": "a", "letter": "x"}] and read_rows().rows == rows
    assert read_rows().settings == read_subject(recipe_of(inputs), OPTIONS, high, rows, None).settings
    for line, message in (
        ('{"prompt": "a"}', r"the held-out rows have the fields \['prompt'\]"),
        ('{"text": "a"}', "read_prompts"),
    ):
        file.write_text(line)
        with pytest.raises(ValueError, match=f"^--held-out {file}: {message}"):
            read_rows()


@pytest.mark.parametrize(
    "policy_loss, flag, scales", [("grpo", None, True), ("dr_grpo", None, False), ("dr_grpo", True, True)]
)
def test_dr_grpo_does_not_divide_advantages_by_standard_deviations(policy_loss, flag, scales, inputs, tmp_path):
    options = dataclasses.replace(OPTIONS, policy_loss=policy_loss, scale_rewards=flag)
    assert open_trainer(recipe_of(inputs), tmp_path / "run", [{"prompt": "a"}], options).rollouts._scale is scales
    assert list_settings(options, high, [])["--scale-rewards"] is scales


@pytest.mark.grid
def test_a_call_raises_rewards_and_goes_on(inputs, tmp_path):
    optimizer = training.Optimization(learning_rate=1e-2, warmup=0, rates="constant")
    recipe = recipe_of(inputs, data=None, steps=8, seq=32, log_every=1, sample_every=0, optimizer=optimizer)
    run_to = lambda steps, folder, reward=high: train_on_rewards(
        dataclasses.replace(recipe, steps=steps),
        tmp_path / folder,
        reward,
        OPTIONS,
        rows=ROWS,
        devices=jax.devices()[:1],
        screen=Screen(silent=True),
    )
    uninterrupted = run_to(8, "whole")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert (uninterrupted.start, uninterrupted.step, uninterrupted.metrics["reward"]) == (0, 8, rows[-1]["reward"])
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    assert run_to(4, "halves").step == 4
    with pytest.raises(ValueError, match=r"--reward: high with .* -> low with"):
        run_to(8, "halves", low)
    half = run_to(8, "halves")
    assert (half.start, half.metrics["loss"]) == (4, uninterrupted.metrics["loss"])
    answer = lambda folder: eqformer.load(folder).generate("a", max_new_tokens=8, temperature=0)
    assert answer(half.folder) == answer(uninterrupted.folder) != answer(inputs / "M")
