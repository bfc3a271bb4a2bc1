"""Training on conversations: only replies count in the loss, and samples use the model's chat template."""

import dataclasses
import io
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_server import serve_hub
from nn_reference import random_module
from script_helpers import losses, rows, run_here
from text_cases import CONFIG, published_folder, small_model, TEMPLATE

import eqformer
from eqformer import data, generation, models
from eqformer.recipes import RECIPES
from eqformer.text import load_run_encoder


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
        "preferences": [{"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"}] * 40,
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
    from eqformer.recipes._texts import sample_prompt

    tokenizer = data.ByteTokenizer()
    encoder = data.ConversationEncoder(tokenizer, data.ChatTemplate(folder / "model"), end_ids=(10, 0))
    recipe = dataclasses.replace(RECIPES["llama"](), data=folder / "pairs.jsonl", prompt="1 + 1")
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


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [[], ["--reference", "stored"], ["--lora.rank", 2, "--simulate", 2, "--mesh.fsdp", 2], ["--loss", "orpo"]],
)
def test_a_run_learns_preferences(folder, tmp_path, flags):
    command = ["--model", folder / "model", "--data", folder / "preferences.jsonl", *FLAGS, "--loss", "dpo"]
    command[command.index("--batch") + 1] = "4"
    command += ["--beta", 0.5, "--optimizer.learning-rate", 1e-2, *flags, "--run-dir", tmp_path / "run"]
    done = run_here("pretrain.py", *command, "--steps", 6)
    assert done.returncode == 0, done.stderr
    margins = values_of(tmp_path / "run", "reward_margin")
    held_out = values_of(tmp_path / "run", "validation_reward_margin")  # of the same pair
    assert held_out[-1] > margins[-1] and values_of(tmp_path / "run", "validation_reward_accuracy")[-1] == 1
    if "orpo" in flags:
        assert margins[-1] > margins[0]
        return
    assert losses(tmp_path / "run")[0] == pytest.approx(np.log(2), rel=1e-5) and abs(margins[0]) < 1e-5
    assert margins[-1] > 0.1 and values_of(tmp_path / "run", "reward_accuracy")[-1] == 1
    # A run that goes on has the same reference: the margin does not begin anew.
    again = run_here("pretrain.py", *command, "--steps", 7, "--prolong", "hold")
    assert again.returncode == 0 and values_of(tmp_path / "run", "reward_margin")[-1] > margins[-1], again.stderr
    refused = run_here("pretrain.py", *command, "--steps", 8, "--prolong", "hold", "--beta", 0.1)
    assert refused.returncode == 2 and "beta: 0.5 -> 0.1" in refused.stderr


@pytest.mark.grid
def test_chats_and_preferences_of_the_hub(folder, tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def table(rows) -> bytes:
        written = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), written)
        return written.getvalue()

    other = [*TALK[:1], TALK[1] | {"content": "No."}]
    pair = {"prompt": "How?", "chosen": TALK, "rejected": other, "messages": TALK, "score_chosen": 1.0}
    repositories = {
        "datasets/owner/chats": {"data/train-0.parquet": table([{"messages": TALK}] * 40), "README.md": b"# Card"},
        "datasets/owner/pairs": {"data/train_prefs-0.parquet": table([pair] * 40), "data/train_sft-0.csv": b"x"},
    }
    flags = ["--model", folder / "model", *FLAGS, "--batch", 4, "--text.validation", 0.2, "--run-dir"]
    with serve_hub(repositories, set(), tmp_path / "home", monkeypatch):
        shown = run_here("pretrain.py", *flags, tmp_path / "none", "--data", "owner/chats@v1", "--show-example")
        assert "[[Né, so.<|endoftext|>]]" in shown.stdout, shown.stderr
        assert shown.stderr.count("warning: ") == 1 and "skipped files of other kinds: 1 (README.md)" in shown.stderr
        chats = run_here("pretrain.py", *flags, tmp_path / "chats", "--data", "owner/chats")
        assert chats.returncode == 0, chats.stderr
        name = "owner/pairs/data/train_prefs-0.parquet"
        pairs = run_here("pretrain.py", *flags, tmp_path / "pairs", "--data", name, "--loss", "dpo", "--beta", 0.5)
        assert pairs.returncode == 0, pairs.stderr
    local = tmp_path / "local.jsonl"
    local.write_text("\n".join(map(json.dumps, [{"messages": TALK}] * 40)))
    done = run_here("pretrain.py", *flags, tmp_path / "local", "--data", local)
    assert done.returncode == 0 and losses(tmp_path / "chats")[0] == pytest.approx(losses(tmp_path / "local")[0])
    assert losses(tmp_path / "pairs")[0] == pytest.approx(np.log(2), rel=1e-5)
    assert values_of(tmp_path / "pairs", "reward_margin")[-1] > 0


@pytest.mark.grid
@pytest.mark.parametrize("flags", [[], ["--lora.rank", 2, "--simulate", 2, "--mesh.fsdp", 2]])
def test_a_run_learns_from_labelled_completions(folder, tmp_path, flags):
    labelled = [
        {"prompt": f"{number} is ", "completion": word, "label": word == "yes"}
        for number in range(40)
        for word in ("yes", "no")
    ]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    command = ["--model", folder / "model", "--data", tmp_path / "labelled.jsonl", *FLAGS, "--loss", "kto"]
    command += ["--beta", 0.5, "--optimizer.learning-rate", 1e-2, *flags, "--run-dir", tmp_path / "run"]
    done = run_here("pretrain.py", *command, "--steps", 8)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run")[0] == pytest.approx(0.5, abs=1e-5)
    chosen, rejected = (values_of(tmp_path / "run", f"rewards_{name}") for name in ("chosen", "rejected"))
    assert chosen[-1] - rejected[-1] > 0.1 and min(values_of(tmp_path / "run", "baseline")) >= 0


@pytest.mark.grid
@pytest.mark.parametrize("flags", [[], ["--distillation.top", 5], ["--simulate", 2, "--mesh.fsdp", 2, "--zero", 3]])
def test_a_run_learns_from_a_teacher(folder, tmp_path, flags):
    tokenizer = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(small_model(1), tmp_path / "teacher", config=CONFIG, files=tokenizer)
    options = ["--distillation.weight", 1.0, "--distillation.temperature", 2.0, *FLAGS, *flags]
    command = ["--model", folder / "model", "--data", folder / "pairs.jsonl", "--teacher", tmp_path / "teacher"]
    command += [*options, "--optimizer.learning-rate", 1e-2, "--run-dir", tmp_path / "run"]
    done = run_here("pretrain.py", *command, "--steps", 6)
    assert done.returncode == 0, done.stderr
    divergences = values_of(tmp_path / "run", "divergence")
    assert losses(tmp_path / "run") == pytest.approx([4 * value for value in divergences], rel=1e-4)
    assert divergences[-1] < 0.9 * divergences[0] and "next_token_loss" in rows(tmp_path / "run", "divergence")[0]
    again = run_here("pretrain.py", *command, "--steps", 7, "--prolong", "hold")
    assert again.returncode == 0 and len(values_of(tmp_path / "run", "divergence")) == 7, again.stderr


def test_teachers_that_are_refused(folder, tmp_path):
    def refused(*flags) -> str:
        command = ["--simulate", 1, "--run-dir", tmp_path / "run", "--model", folder / "model", *flags]
        done = run_here("pretrain.py", "--data", folder / "pairs.jsonl", *command)
        assert done.returncode == 2 and done.stderr.count("error:") == 1 and not (tmp_path / "run").exists()
        return done.stderr

    larger = dataclasses.replace(CONFIG, vocab=CONFIG.vocab + 1)
    models.save(random_module(models.build, larger, key=jax.random.key(0)), tmp_path / "larger", config=larger)
    teacher = ["--teacher", folder / "model"]
    assert "give --teacher, or leave the --distillation flags out" in refused("--distillation.weight", 1.0)
    assert "leave --loss dpo and --optimizer.z-loss 0.0 out" in refused(*teacher, "--loss", "dpo")
    assert "the teacher has 257 ids and the model 256" in refused("--teacher", tmp_path / "larger")
    assert "give a number of ids from 1 to 256" in refused(*teacher, "--distillation.top", 300)
    assert "weight at least 0 and at most 1" in refused(*teacher, "--distillation.weight", 2.0)
    published_folder(tmp_path / "others")
    text = data.ByteTokenizer().to_json().replace('"a": 97, "b": 98', '"a": 98, "b": 97')
    (tmp_path / "others" / "tokenizer.json").write_text(text)
    assert "2 of 256 ids differ, such as 97, which is 'a' and 'b'" in refused("--teacher", tmp_path / "others")


def values_of(run_dir, name: str) -> list[float]:
    """The values of a metric in the order of steps."""
    return [row[name] for row in rows(run_dir, name)]


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
    assert "the data is plain text" in refused("--data", folder / "plain.txt", "--show-example")
    assert "give --data CHATS.jsonl, and the --model" in refused("--show-example")
    mix = ["--text.mix", f"{folder / 'chats.jsonl'}=1", f"{folder / 'plain.txt'}=1"]
    assert "has conversations, and other sources have plain text" in refused("--model", folder / "model", *mix)
    assert "pairs are read from a file or folder; give --data" in refused("--loss", "dpo")
    pairs = ["--model", folder / "model", "--data", folder / "preferences.jsonl", "--loss", "dpo"]
    assert "leave --text.hub and --loss-on all out" in refused(*pairs, "--loss-on", "all")
    assert "--beta 0.0" in refused(*pairs, "--beta", 0)
    assert "whole groups of 2 rows" in refused(*pairs, "--batch", 3)
    assert "must have `prompt`, `chosen` and `rejected`" in refused(*pairs, "--data", folder / "pairs.jsonl")
    labelled = ["--model", folder / "model", "--data", folder / "preferences.jsonl", "--loss", "kto"]
    assert "preferences.jsonl#0 must have" in refused(*labelled)
    assert "must have a `label` of true or false, but its label is None" in refused(
        *labelled, "--data", folder / "pairs.jsonl"
    )
    assert "--desirable-weight 0.0" in refused(*labelled, "--desirable-weight", 0)
    assert CONFIG.vocab == data.ByteTokenizer.vocab


@pytest.mark.grid
def test_the_command_trains_an_embedder(tmp_path):
    """Rows of groups; a bad one is named, and nothing is written."""
    rows_of = lambda texts: "\n".join(json.dumps({"anchor": text, "positive": text[::-1]}) for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows_of([f"text {number}" for number in range(40)]))
    (tmp_path / "bad.jsonl").write_text(rows_of(["text", " ", *["text"] * 40]))
    flags = ["--recipe", "bert-byte-200k", "--loss", "contrastive", *FLAGS[:2], "--batch", 8, *FLAGS[4:]]
    bad = run_here("pretrain.py", *flags, "--data", tmp_path / "bad.jsonl", "--run-dir", tmp_path / "bad")
    assert bad.returncode and "bad.jsonl#1: `anchor` has no text" in bad.stderr and not (tmp_path / "bad").exists()
    done = run_here("pretrain.py", *flags, "--data", tmp_path / "rows.jsonl", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "nats a group in training" in done.stdout and "of positives found" in done.stdout
    assert load_run_encoder(tmp_path / "run").embed("text").shape == (64,)


# The ends of these answers are the last, the third and the only token of their blocks of four tokens.
ANSWERS = {"How?": "So and so.", "Why?": "For that.", "Who?": "So one."}


def write_block_model(folder):
    """Publish a small SDAR with a chat template and a tokenizer whose byte 3 is the mask token; return its folder."""
    config = models.SDARConfig(256, 32, 2, 4, 2, 64, head_dim=8, block=4)
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    tokenizer = json.loads(files["tokenizer.json"])
    token = tokenizer["added_tokens"][0] | {"id": 3, "content": "<|MASK|>", "special": True}
    tokenizer["added_tokens"].append(token)
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {("<|MASK|>" if number == 3 else name): number for name, number in vocab.items()}
    files |= {"tokenizer.json": json.dumps(tokenizer), "chat_template.jinja": TEMPLATE}
    models.save(eqx.filter_jit(models.build)(config, key=jax.random.key(0)), folder, config=config, files=files)
    return folder


@pytest.mark.grid
def test_a_model_of_block_diffusion_learns_the_answers_of_chats_and_gives_them(tmp_path):
    model, chats = write_block_model(tmp_path / "model"), tmp_path / "chats.jsonl"
    asked = lambda question: {"role": "user", "content": question}
    rows = [{"messages": [asked(q), {"role": "assistant", "content": answer}]} for q, answer in ANSWERS.items()]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    flags = (
        "--loss block-diffusion --seq 48 --batch 8 --steps 200 --log-every 50 --checkpoint-every 200 "
        "--validate-every 200 --validation-batches 1 --sample-every 0 --simulate 1 --optimizer.name adamw "
        "--optimizer.learning-rate 1e-2 --optimizer.warmup 5"
    ).split()
    done = run_here("pretrain.py", "--model", model, "--data", chats, *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    before, after = eqformer.load(model), eqformer.load(tmp_path / "run")
    assert before.sampler == after.sampler == generation.BlockSampler(mask_id=3)
    answers = [after.chat([asked(question)], max_new_tokens=24, temperature=0) for question in ANSWERS]
    assert answers == list(ANSWERS.values())
    settings = ["--prompt", "Why?", "--temperature", 0, "--tokens", 24]
    sampled = run_here("sample.py", "--run-dir", tmp_path / "run", *settings)
    assert sampled.returncode == 0 and "For that." in sampled.stdout, sampled.stderr
    # The controls: the published model does not know the answers, and the run did not learn the questions.
    assert before.chat([asked("How?")], max_new_tokens=24, temperature=0) != ANSWERS["How?"]
    question, answer = after.log_likelihood(["<user>", "<user>How?<assistant>"], ["How?", ANSWERS["How?"]])
    assert question < -8 and answer > -1
