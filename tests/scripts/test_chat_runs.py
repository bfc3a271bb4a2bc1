"""Runs on conversations: the loss is that of the replies alone, and samples ask by the model's template."""

import dataclasses
import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from recipes import RECIPES
from script_helpers import losses, rows, run_here
from text_cases import CONFIG, published_folder, small_model, TEMPLATE

from eqformer import data


TALK = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Né, so."}]
FLAGS = (
    "--seq 48 --batch 2 --steps 2 --log-every 1 --checkpoint-every 2 --validate-every 2 --validation-batches 1 "
    "--sample-every 0 --simulate 1 --optimizer.name adamw --optimizer.learning-rate 1e-3"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published chat model, and files of conversations, of pairs of texts and of both."""
    place = tmp_path_factory.mktemp("chats")
    published_folder(place / "model", chat_template__jinja=TEMPLATE)
    pair = {"prompt": "1 + 1", "completion": " = 2"}
    for name, chats in {
        "chats": [{"messages": TALK}] * 40,
        "pairs": [pair] * 40,
        "mixed": [pair, {"messages": TALK}],
    }.items():
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (place / "plain.txt").write_text("a text\n" * 200)
    return place


def mean_nats(ids: list[int], first: int) -> float:
    """The mean over the ids from `first` on, by the published model in one plain pass."""
    logits = np.asarray(eqx.filter_jit(small_model())(jnp.asarray([ids]))[0][0], np.float64)[first - 1 : -1]
    targets = np.array(ids[first:])
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets]))


def test_a_run_learns_the_replies(folder, tmp_path):
    prompt, reply = b"<user>How?<assistant>", "Né, so.".encode() + b"\0"
    flags = ["--model", folder / "model", "--data", folder / "chats.jsonl", *FLAGS]
    done = run_here("pretrain.py", *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run")[0] == pytest.approx(mean_nats([*prompt, *reply], len(prompt)), rel=1e-4)
    assert rows(tmp_path / "run", "validation_loss")
    # The control: of all tokens the loss is another one.
    assert losses(tmp_path / "run")[0] != pytest.approx(mean_nats([*prompt, *reply], 1), rel=1e-2)
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert recipe["text"]["packing"] == "documents" and recipe["loss_on"] == "assistant"


@pytest.mark.grid
def test_a_run_is_continued_and_writes_samples(folder, tmp_path):
    flags = ["--model", folder / "model", "--data", folder / "chats.jsonl", *FLAGS, "--sample-every", 2]
    assert run_here("pretrain.py", *flags, "--run-dir", tmp_path / "run").returncode == 0
    assert "Why is the sky blue?" in (tmp_path / "run" / "samples.txt").read_text()
    more = [*flags, "--run-dir", tmp_path / "run"]
    more[more.index("--steps") + 1] = "3"
    again = run_here("pretrain.py", *more, "--prolong", "hold")
    assert again.returncode == 0 and len(losses(tmp_path / "run")) == 3, again.stderr
    other = run_here("pretrain.py", *more, "--prolong", "hold", "--loss-on", "all")
    assert other.returncode == 2 and "loss_on: 'assistant' -> 'all'" in other.stderr


def test_a_sample_has_the_form_of_the_data(folder):
    from support.chats import sample_prompt

    tokenizer = data.ByteTokenizer()
    encoder = data.ConversationEncoder(tokenizer, data.ChatTemplate(folder / "model"), end_ids=(10, 0))
    recipe = dataclasses.replace(RECIPES["default"](), data=folder / "pairs.jsonl", prompt="1 + 1")
    assert sample_prompt(recipe, tokenizer, encoder) == ([*b"1 + 1"], (10, 0))
    chats = dataclasses.replace(recipe, data=folder / "chats.jsonl")
    assert sample_prompt(chats, tokenizer, encoder) == ([*b"<user>1 + 1<assistant>"], (10, 0))
    assert sample_prompt(recipe, tokenizer, None) == ([*b"1 + 1"], (0,))


@pytest.mark.grid
def test_prompts_and_completions_and_all_tokens(folder, tmp_path):
    model = ["--model", folder / "model", *FLAGS]
    pairs = run_here("pretrain.py", *model, "--data", folder / "pairs.jsonl", "--run-dir", tmp_path / "pairs")
    assert pairs.returncode == 0, pairs.stderr
    assert losses(tmp_path / "pairs")[0] == pytest.approx(mean_nats([*b"1 + 1 = 2\0"], 5), rel=1e-4)
    whole = ["--data", folder / "chats.jsonl", "--loss-on", "all", "--run-dir", tmp_path / "whole"]
    done = run_here("pretrain.py", *model, *whole)
    text = [*"<user>How?<assistant>Né, so.".encode(), 0]
    assert done.returncode == 0 and losses(tmp_path / "whole")[0] == pytest.approx(mean_nats(text, 1), rel=1e-4)
    mixed = run_here("pretrain.py", *model, "--data", folder / "mixed.jsonl", "--run-dir", tmp_path / "mixed")
    assert mixed.returncode == 2 and "mixed.jsonl#1 has messages, but mixed.jsonl#0 has prompt" in mixed.stderr
    assert not (tmp_path / "mixed").exists()


def test_an_example_shows_what_is_learned(folder, tmp_path):
    shown = run_here(
        "pretrain.py", "--model", folder / "model", "--data", folder / "chats.jsonl", "--show-example", "--simulate", 1
    )
    assert shown.returncode == 0, shown.stderr
    assert "30 tokens, of which 9 are learned" in shown.stdout
    assert "<user>How?<assistant>[[Né, so.<|endoftext|>]]" in shown.stdout


def test_what_is_refused(folder, tmp_path):
    def refused(*flags) -> str:
        done = run_here("pretrain.py", "--simulate", 1, "--run-dir", tmp_path / "run", *flags)
        assert done.returncode == 2 and done.stderr.count("error:") == 1 and not (tmp_path / "run").exists()
        return done.stderr

    assert "there is no published model; give --model" in refused("--data", folder / "chats.jsonl", "--show-example")
    assert "the text is no conversations" in refused("--data", folder / "plain.txt", "--show-example")
    mix = ["--text.mix", f"{folder / 'chats.jsonl'}=1", f"{folder / 'plain.txt'}=1"]
    assert "has conversations, and others have text" in refused("--model", folder / "model", *mix)
    assert CONFIG.vocab == data.ByteTokenizer.vocab
