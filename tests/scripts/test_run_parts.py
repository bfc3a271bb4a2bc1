"""Parts of the scripts before and beside training, tested without a run."""

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import convert
import equinox as eqx
import jax
import numpy as np
import pretrain
import pytest
import sample
from rich.console import Console
from support.command import parse

from eqformer import data, dataclass_to_json, models, nn, text, training
from eqformer.recipes import _report, _trainer, find_recipe, Recipe, RECIPES, RunDirectory, Screen, Text
from eqformer.recipes._report import metrics_line, opening_line
from eqformer.recipes._setup import (
    build_model,
    check,
    check_run,
    count_parameters,
    make_keys,
    make_optimizer,
    model_shapes,
)
from eqformer.recipes._texts import check_published, copy_published_files, recipe_tokenizer
from eqformer.training import _run_folder, Lora, Optimization


CONFIG = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": True}


@pytest.fixture
def folder(tmp_path):
    """A published folder but for its weights, which begins each prompt with a token of its own."""
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 10}))
    file = json.loads(data.ByteTokenizer().to_json())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    file["post_processor"] = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": known}
    (tmp_path / "published" / "tokenizer.json").write_text(json.dumps(file))
    return tmp_path / "published"


def recipe(**changes):
    return Recipe(**{"model": models.preset("llama-byte-1m"), **changes})


def refusal(main, capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_a_published_folder_is_found_from_where_one_stands(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    run = parse(pretrain.Command, ["--model", folder.name]).run
    assert run.published == folder
    check_published(run)
    with pytest.raises(ValueError, match="published: .* -> 'published'"):
        check_published(dataclasses.replace(run, published=Path(folder.name)))


def test_a_published_model_is_trained_gently_by_every_recipe_that_was_not_written_for_one(folder, monkeypatch):
    for name in RECIPES:
        flags = ["--recipe", name, "--model", str(folder)]
        assert parse(pretrain.Command, flags).run.optimizer == Optimization("adamw", learning_rate=1e-4)
        asked = parse(pretrain.Command, [*flags, "--optimizer.name", "muon"]).run.optimizer
        assert asked == Optimization("muon", learning_rate=1e-4)
    named_optimizer = Optimization("sgd", learning_rate=0.5)
    monkeypatch.setitem(RECIPES, "tune", lambda: recipe(published=folder, optimizer=named_optimizer))
    assert parse(pretrain.Command, ["--recipe", "tune", "--model", str(folder)]).run.optimizer == named_optimizer


def test_an_optimizer_named_by_a_flag_takes_no_setting_of_the_recipe_that_it_lacks(monkeypatch, capsys):
    spectral = Optimization("normuon", update_size="spectral", momentum=0.9, weight_decay=0.3)
    monkeypatch.setitem(RECIPES, "own", lambda: recipe(optimizer=spectral))
    chosen = lambda *flags: parse(pretrain.Command, ["--recipe", "own", *flags]).run.optimizer
    assert chosen("--optimizer.name", "adamw") == Optimization("adamw", weight_decay=0.3)
    assert chosen("--optimizer.name", "muon") == dataclasses.replace(spectral, name="muon")
    by_path = chosen("--optimizer.name", "adamw", "--optimizer.paths", "up.weight=muon")
    assert by_path == dataclasses.replace(spectral, name="adamw", paths=("up.weight=muon",))
    # The control: a setting that the command line names itself stays, and is refused.
    shapes = model_shapes(recipe())
    asked = chosen("--optimizer.name", "adamw", "--optimizer.momentum", "0.8")
    with pytest.raises(ValueError, match=r"^Optimization\(name='adamw', momentum=0.8\): adamw has no setting momentum"):
        asked.optimizer(shapes, asked.phases(20))


@pytest.mark.quick
def test_dtypes_go_by_short_names():
    run = parse(pretrain.Command, ["--precision.compute", "bf16", "--precision.parameters=half"]).run
    assert run.precision == nn.Precision("float16", "bfloat16")
    assert json.dumps(dataclass_to_json(run)).count('"bfloat16"') == 1  # a run's file holds the full names


def test_products_of_8_bits_are_for_training():
    run = parse(pretrain.Command, ["--precision.products", "fp8"]).run
    assert run.precision == nn.Precision(products="fp8")
    maps = nn.linear_maps(model_shapes(run).stacks)
    assert maps and all(isinstance(one, nn.Fp8Linear) for one in maps)
    assert "fp8" in json.dumps(dataclass_to_json(run))


def test_a_folder_is_a_recipes_once_something_is_saved(tmp_path):
    def claim(**changes):
        with RunDirectory(tmp_path / "run") as directory:
            directory.claim("name", recipe(**changes))
            directory.begin("name", recipe(**changes))
        return directory.read()[1]

    def saved(step):
        with training.Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
            about = {"rates": [dataclasses.asdict(its) for its in Optimization().phases(9)]}
            checkpointer.save({"x": np.zeros(1)}, step, about)

    other = models.preset("gpt2")
    claim()
    assert claim(seq=64, model=other) == recipe(seq=64, model=other)  # nothing of the first was trained
    (tmp_path / "run" / "published").mkdir()
    with pytest.raises(ValueError, match="published: None -> 'elsewhere'"):
        claim(published=Path("elsewhere"))
    claim()
    saved(0)
    assert claim(seq=64).seq == 64
    with pytest.raises(ValueError, match="differs in\n  model: "):
        claim(model=other)
    saved(3)
    assert claim(seq=64, steps=9).steps == 9
    with pytest.raises(ValueError, match="differs in\n  seq: 64 -> 256\nGive"):
        claim()


def test_the_end_of_text_is_asked_of_what_can_have_another(folder):
    of = lambda end, **more: recipe_tokenizer(recipe(text=Text(end_of_text=end), **more))
    assert (of(None).end_of_text, of("A", published=folder).end_of_text, of(None, published=folder).end_of_text) == (
        *(0, 65, 10),
    )
    with pytest.raises(ValueError, match="end_of_text=''"):
        of("", published=folder)  # a name like any other, and none that this tokenizer knows
    (folder / "tokenizer.json").unlink()
    for more in ({}, {"published": folder}):
        with pytest.raises(ValueError, match="--text.end-of-text A: with bytes as tokens, the byte 0 ends a text"):
            of("A", **more)


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_broken_configuration_is_named(text, folder):
    assert models.read_eos_token_ids(folder) == [10]
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json: it"):
        models.read_eos_token_ids(folder)


@pytest.mark.parametrize(
    "flags,words",
    [
        ("--model {folder} --run-dir runs/a", "--model {folder} --run-dir runs/a: only one model is loaded"),
        ("--run-dir runs/a --dtype bfloat16", "--dtype bfloat16: a run's model"),
        ("--model {folder} --dtype int8", "error: --dtype int8: 'int8' is no floating-point dtype"),
        ("--model {folder} --simulate 0", "--simulate 0: give a number of devices"),
    ],
)
def test_flags_of_sample_that_do_not_fit(flags, words, folder, capsys):
    message = refusal(sample.main, capsys, *flags.format(folder=folder).split())
    assert words.format(folder=folder) in re.sub(r"\s+", " ", message)


def test_a_gguf_file_brings_its_tokenizer_to_a_run_and_into_its_exports(tmp_path, capsys):
    """A run reads text in the file's own tokens, keeps what it needs of them, and publishes them with the model."""
    file = Path(__file__).parents[1] / "fixtures" / "qwen3moe.gguf"
    begun = parse(pretrain.Command, ["--model", str(file), "--run-dir", str(tmp_path / "run")]).run
    companions = models.gguf_companion_files(file)
    assert (
        recipe_tokenizer(begun).encode("ab cd").tolist()
        == tokenizer_from(companions, tmp_path).encode("ab cd").tolist()
    )
    run = RunDirectory(tmp_path / "run")
    run.published.parent.mkdir()
    copy_published_files(begun, run)
    assert {copied.name for copied in run.published.iterdir()} == companions.keys()
    assert recipe_tokenizer(begun, run).end_of_text == models.read_eos_token_ids(run.published)[0]
    model = models.load(file)
    run.write_recipe("file", begun)
    with run.checkpointer() as checkpointer:
        checkpointer.save({"model": model}, 1, {})
    text.export_run(run.path, tmp_path / "out")
    assert eqx.tree_equal(*jax.device_get((models.load(tmp_path / "out"), model)))
    assert (
        companions.items() <= {copied.name: copied.read_text() for copied in (tmp_path / "out").glob("*.json")}.items()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    message = refusal(sample.main, capsys, "--model", file, "--weights", "quantized")
    assert "weights='quantized'" in message and "is not, but all layers of a stack must have one format" in message


def tokenizer_from(files: dict[str, str], folder: Path) -> data.FileTokenizer:
    """The tokenizer of files by their names."""
    (folder / "tokenizer.json").write_text(files["tokenizer.json"])
    return data.FileTokenizer(folder / "tokenizer.json", end_of_text="<|end|>")


def test_the_default_prompt_fits_the_model(folder):
    """A chat is asked a question in its template, a published model begins a story, and a run of one's own code."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    methods = dict.fromkeys(("encode", "unembed", "decode", "init_cache"), print)
    model: Any = SimpleNamespace(vocab=256, max_seq=None, start=None, **methods)  # asked for nothing
    published = text.LLM(model, data.ByteTokenizer())
    chats = dataclasses.replace(published, chat_template=data.ChatTemplate(folder))
    asked = lambda llm, **flags: sample.default_prompt(sample.Command(**flags), llm)
    assert asked(published) == "Once upon a time"
    assert asked(dataclasses.replace(published, special_tokens=False)) == "def "
    assert asked(chats) == "Why is the sky blue?" and asked(chats, chat="no") == "Once upon a time"


def test_the_speed_counts_tokens_once_both_programs_are_compiled():
    times = [5.0] * 8 + [9.0] * 8 + [9.5] * 8 + [10.0] * 8
    assert sample.speed_line(1.0, times) == "32 tokens in 9.0 s, the first after 4.0 s; 16.0 tokens/s once compiled"
    assert (
        sample.speed_line(1.0, times[:16]) == "16 tokens in 8.0 s, the first after 4.0 s"
        and sample.speed_line(1.0, []) == "0 tokens"
    )


def test_an_adapter_is_of_a_run(folder, capsys):
    words = refusal(convert.main, capsys, folder, folder.parent / "new", "--adapter")
    assert "--adapter: only a run" in words and not (folder.parent / "new").exists()


@pytest.mark.parametrize("prompt,read", [("def f(x): return", 16), ("d" * 30, 20), ("", 1)])
def test_samples_stay_within_learned_positions_and_colours_are_of_their_ids(prompt, read, tmp_path, monkeypatch):
    numbers = dataclasses.replace(find_recipe("gpt2-byte-1m").model, max_seq=20)
    asked, coloured = [], []

    def generate(sampler, model, prompts, *, max_new_tokens, **_):
        asked.append((len(prompts[0]), max_new_tokens))
        return SimpleNamespace(new_ids=lambda: [[255] * max_new_tokens + [256]])  # no UTF-8, and no id

    monkeypatch.setattr(_trainer.generation.NextTokenSampler, "generate", generate)
    monkeypatch.setattr(nn, "chooses_experts", lambda model: True)
    monkeypatch.setattr(nn, "first_experts", lambda model, ids: ids[None])
    monkeypatch.setattr(_run_folder, "plot_experts", lambda chosen, pieces, *_, **__: coloured.append((chosen, pieces)))
    run = recipe(model=numbers, prompt=prompt)
    parts = {"recipe": run, "keys": make_keys(run), "tokenizer": data.ByteTokenizer(), "screen": Screen(silent=True)}
    trainer: Any = SimpleNamespace(**parts, encoder=None, directory=RunDirectory(tmp_path))
    _trainer.Trainer._write_sample(trainer, eqx.filter_eval_shape(build_model, run), 1)
    assert asked == [(read, 21 - read)]
    ids = (list(prompt.encode()) or [0])[:read] + [255] * (21 - read)
    assert [chosen.tolist() for chosen, _ in coloured] == [[ids[:20]]] * 2
    assert all(len(pieces) == 20 and "".join(pieces).startswith(prompt[:read]) for _, pieces in coloured)
    assert "\ufffd" in (tmp_path / "samples.txt").read_text()


def test_a_run_that_goes_on_is_one_run_where_it_is_looked_at(tmp_path, monkeypatch):
    opened = []
    board, bias = ModuleType("tensorboardX"), ModuleType("wandb")
    nothing = SimpleNamespace(close=lambda: None, finish=lambda: None)
    board.__dict__["SummaryWriter"] = lambda folder, purge_step: opened.append(purge_step) or nothing
    bias.__dict__["init"] = lambda **options: opened.append(options["id"]) or nothing
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(sys.modules, "wandb", bias)
    for start in (0, 7, 0):
        with RunDirectory(tmp_path).open_metrics(start, tensorboard=True, wandb="p", recipe=recipe()):
            pass
    steps, (first, again, anew) = opened[::2], opened[1::2]
    assert steps == [0, 8, 0] and first == again != anew


def test_lines_without_a_terminal_are_of_new_figures(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(_report.time, "monotonic", lambda: clock[0])
    with Screen().steps(100, 40) as show:
        for done in range(41, 101):
            show(done, f"loss of {done // 10 * 10}", done % 10 == 0)
            clock[0] += 3
    lines = capsys.readouterr().out.splitlines()
    # A step takes three seconds; the line of a step has its own figures and the time that is left.
    assert lines == [
        f"step {done}/100  loss of {done}  ETA 0:{3 * (100 - done) // 60:02}:{3 * (100 - done) % 60:02}"
        for done in range(50, 101, 10)
    ]


def test_a_terminal_of_eighty_columns_shows_all():
    screen, text = Screen(), io.StringIO()
    screen.console = Console(file=text, force_terminal=True, width=80, color_system=None)
    last = {"loss": 1.234, "validation_loss": 1.345, "learning_rate": 3e-3, "tokens_per_second": 22800.0, "mfu": 0.6}
    with screen.steps(320, 0) as show:
        show(200, metrics_line(last), True)
    shown = " ".join(text.getvalue().split())
    for words in ("step 200/320", "62%", "ETA", "loss 1.234", "validation 1.345", "rate 3.00e-03", "22,800 tokens/s"):
        assert words in shown


@pytest.mark.parametrize("rank", [0, 2])
def test_the_opening_counts_trained_and_all_parameters(rank, tmp_path):
    run = recipe(lora=Lora(rank=rank))
    shapes = eqx.filter_eval_shape(build_model, run)
    trained, in_all = count_parameters(make_optimizer(run, shapes), shapes)
    factors = rank * 4 * (2 * (128 + 128) + 2 * (128 + 64))  # of four layers' queries, outputs, keys and values
    assert in_all == 820352 + factors and trained == (factors or in_all)
    line = opening_line("name", run, RunDirectory(tmp_path), 0, (trained, in_all), "7 training tokens")
    assert f"of {in_all:,} parameters, " + (f"{factors:,} of them trained (" if rank else "all trained, ") in line


def test_a_run_goes_on_by_its_copy_once_the_published_folder_has_moved(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "run")
    flags = ["--model", str(folder), "--run-dir", str(run.path)]
    begun = parse(pretrain.Command, flags).run
    with run:
        run.claim("published", begun)
        run.begin("published", begun)
        copy_published_files(begun, run)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="published"):  # it has no weights of its own yet
        parse(pretrain.Command, flags)
    with training.Checkpointer(run.checkpoints) as checkpointer:
        checkpointer.save(
            {"x": np.zeros(1)},
            3,
            {"rates": [dataclasses.asdict(its) for its in begun.optimizer.phases(begun.steps)]},
        )
    again = parse(pretrain.Command, flags).run
    for spelled in (["--run_dir", str(run.path)], [f"--run_dir={run.path}"]):
        assert parse(pretrain.Command, [*flags[:2], *spelled]).run == again
    check_published(again, run)
    assert again == begun and recipe_tokenizer(again, run).end_of_text == 10
    with run:
        run.claim("published", again)
    with pytest.raises(ValueError, match="other"):  # of another folder the run knows nothing
        parse(pretrain.Command, ["--model", str(tmp_path / "other"), "--run-dir", str(run.path)])


def test_a_run_goes_on_by_its_copy_once_the_tokenizer_is_gone(tmp_path):
    def write_tokenizer(path, vocab):
        written = json.loads(data.ByteTokenizer().to_json())
        first = written["added_tokens"][0]
        written["added_tokens"] += [{**first, "id": number, "content": f"<{number}>"} for number in range(256, vocab)]
        path.write_text(json.dumps(written))
        return path

    file, run = write_tokenizer(tmp_path / "mine.json", 258), RunDirectory(tmp_path / "run")
    size = "--model.embed 32 --model.layers 1 --model.heads 4 --model.kv-heads 2 --model.mlp 64".split()
    flags_of_run = lambda path, folder: ["--text.tokenizer", str(path), "--run-dir", str(folder), *size]
    flags = flags_of_run(file, run.path)
    begun = parse(pretrain.Command, flags).run
    with run:
        run.claim("default", begun)
        run.begin("default", begun)
        copy_published_files(begun, run)
    file.unlink()
    missing = "^--text.tokenizer .*mine.json: FileTokenizer"
    with pytest.raises(ValueError, match=missing):  # it has no weights yet
        parse(pretrain.Command, flags)
    with run.checkpointer() as checkpointer:
        checkpointer.save({"x": np.zeros(1)}, 3, {})
    again = parse(pretrain.Command, flags).run
    assert again == begun and check_run(again, run).vocab == 258
    with pytest.raises(ValueError, match="mine.json"):  # the control: a check that knows no run
        check(again)
    with pytest.raises(ValueError, match=missing):
        parse(pretrain.Command, flags_of_run(file, tmp_path / "other"))
    other = write_tokenizer(tmp_path / "other.json", 259)  # a tokenizer that the run has no copy of
    assert parse(pretrain.Command, flags_of_run(other, run.path)).run.model.vocab == 259


def test_a_checkpoint_of_another_run_or_recipe_is_refused_by_name(tmp_path):
    def claimed(name, **changes):
        with RunDirectory(tmp_path / name) as directory:
            directory.claim("name", recipe(**changes))
            directory.begin("name", recipe(**changes))
        return directory

    def save(directory, step, run, **changes):
        about = {"rates": [dataclasses.asdict(its) for its in Optimization().phases(800)]}
        about |= {"recipe": {"name": "name", "recipe": dataclass_to_json(recipe(**changes))}}
        with training.Checkpointer(directory.checkpoints, run=run) as checkpointer:
            checkpointer.save({"x": np.zeros(1)}, step, about)

    one, other = claimed("one"), claimed("other", seed=1)
    assert one.run != other.run and claimed("one").run == one.run
    save(one, 3, one.run)
    assert claimed("one", steps=800).run == one.run  # its own
    save(one, 4, other.run)
    with pytest.raises(training.CheckpointError, match=f"one/checkpoints/4: .*run {other.run}, .*run {one.run}"):
        claimed("one")
    save(other, 3, None, seed=0)  # as older versions saved it, and of another seed
    with pytest.raises(
        ValueError, match="checkpoints/3: .*another recipe .*the recipes differ in\n  seed: 0 -> 1\nMove"
    ):
        claimed("other", seed=1)
    save(other, 4, None, seed=1)
    assert claimed("other", seed=1).run == other.run


def test_a_run_folder_that_is_deleted_or_replaced_is_noticed(tmp_path):
    with RunDirectory(tmp_path / "run") as directory:
        directory.claim("name", recipe())
        directory.begin("name", recipe())
        directory.check_exists()
        directory.path.rename(tmp_path / "away")
        with pytest.raises(ValueError, match="was deleted, moved or replaced while the run wrote to it"):
            directory.check_exists()
        with RunDirectory(tmp_path / "run") as other:  # another run in its place
            other.claim("name", recipe())
            with pytest.raises(ValueError, match="was deleted, moved or replaced"):
                directory.check_exists()
        (tmp_path / "away").rename(tmp_path / "run")
        directory.check_exists()
