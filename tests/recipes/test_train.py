"""`recipes.train`: a run from Python, its resume by the same call, and errors before anything is written."""

import contextlib
import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from haste import same_trees
from text_cases import CONFIG, published_folder, TEMPLATE

import eqformer
from eqformer import data, models, nn, parallel, planning, training
from eqformer.recipes import (
    _trainer,
    Distillation,
    find_recipe,
    Mesh,
    published_recipe,
    Recipe,
    RunDirectory,
    Screen,
    Text,
    train,
)
from eqformer.recipes._setup import (
    init_run_model,
    init_run_state,
    load_teacher,
    make_optimizer,
    make_plan,
    make_train_state,
    model_shapes,
)
from eqformer.recipes._texts import complete_recipe, recipe_tokenizer
from eqformer.recipes._trainer import Trainer


OPTIMIZER = training.Optimization("sgd", learning_rate=3e-3, warmup=2)
QUIET = Screen(silent=True)


def recipe(corpus, **fields):
    """A recipe of three steps of a tiny model."""
    sizes = {"seq": 32, "batch": 4, "steps": 3, "log_every": 1, "validate_every": 3, "validation_batches": 1}
    return Recipe(**{"model": CONFIG, "data": corpus, "optimizer": OPTIMIZER, "sample_every": 0, **sizes, **fields})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"line {line} of text {number}\n" for line in range(20)))
    return str(folder)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return train(recipe(corpus), tmp_path_factory.mktemp("runs") / "mine", devices=jax.devices()[:1], screen=QUIET)


def test_a_run_from_python_goes_on_and_its_model_is_loaded(run, corpus, capsys):
    assert (run.start, run.step, run.folder.name) == (0, 3, "mine")
    assert run.metrics["step"] == 3 and run.metrics["loss"] < 6 and run.metrics["validation_loss"] < 6
    longer = dataclasses.replace(recipe(corpus), steps=5, prolong="hold")
    again = train(longer, run.folder, devices=jax.devices()[:1], screen=QUIET)
    assert (again.start, again.step, again.metrics["step"]) == (3, 5, 5)
    assert capsys.readouterr().out == ""
    ended = train(longer, str(run.folder), devices=jax.devices()[:1])
    assert (ended.start, ended.step) == (5, 5) and ended.metrics == again.metrics
    assert "mine: a LlamaConfig of" in (lines := capsys.readouterr().out) and "already has its 5 steps" in lines
    assert eqformer.load(run.folder).model.vocab == 256


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"steps": 0}, "^--steps 0: give at least 1"),
        ({"mesh": Mesh(fsdp=3)}, "^--mesh.fsdp 3: "),
        ({"data": "nowhere"}, "^--data nowhere .*files"),
        ({"published": "nowhere"}, "nowhere/config.json: the file is missing"),
        ({"text": Text(tokenizer="none.json")}, "^--text.tokenizer none.json: FileTokenizer"),
        ({"optimizer": dataclasses.replace(OPTIMIZER, learning_rate=-1.0)}, "^--optimizer.learning-rate -1.0: "),
        ({"loss": "dpo", "data": None}, "^--loss dpo: pairs are read"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_anything_is_written(fields, message, corpus, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(recipe(corpus, **fields), tmp_path / "run", devices=jax.devices()[:1], screen=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("steps", 2.5, "--steps 2.5: Recipe.steps must be of int; give"),
        ("model", "llama-byte-1m", "--model 'llama-byte-1m': Recipe.model must be of ModelConfig; give"),
        ("loss", "sft", "--loss 'sft': Recipe.loss must be of Literal['next-token', "),
        ("published", 3, "--model 3: Recipe.published must be of Path | str | None; give"),
        ("model", Text(), "--model Text(hub=None"),
        ("mesh", Text(), "--mesh Text(hub=None"),
        ("plan", Text(), "Text(hub=None"),
    ],
)
def test_a_field_of_another_type_is_refused(name, value, message, tmp_path):
    other = recipe("nowhere")
    object.__setattr__(other, name, value)  # The tests' own checks of types would refuse it here.
    other.__post_init__()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as refused:
        train(other, tmp_path / "run", screen=QUIET)
    assert f": Recipe.{name} must be of " in str(refused.value)
    with pytest.raises(ValueError, match="^--data nowhere "):  # the control
        train(recipe("nowhere"), tmp_path / "run", devices=jax.devices()[:1], screen=QUIET)


def test_another_recipe_is_refused_in_the_folder_of_a_run(run, corpus):
    with pytest.raises(ValueError, match="the folder holds a run of recipe 'mine', .* differs in\n  seq: 32 -> 64"):
        train(recipe(corpus, seq=64), run.folder, devices=jax.devices()[:1], screen=QUIET)


def test_a_setting_that_the_optimizer_lacks_does_not_make_a_run_another(run, corpus, tmp_path):
    """Earlier versions wrote such settings into the files of a run."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    stored = json.loads((folder / "recipe.json").read_text())
    for setting, value, is_other in (("update_size", "spectral", False), ("learning_rate", 0.5, True)):
        changed = json.loads(json.dumps(stored))
        changed["recipe"]["optimizer"][setting] = value
        (folder / "recipe.json").write_text(json.dumps(changed))
        message = "differs in\n  optimizer.learning_rate: 0.5 -> 0.003"
        refused = pytest.raises(ValueError, match=message) if is_other else contextlib.nullcontext()
        with RunDirectory(folder) as directory, refused:
            directory.claim("mine", recipe(corpus))


TALK = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
PAIR = {"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"}


@pytest.mark.grid
@pytest.mark.parametrize(
    "row,fields,metric",
    [
        ({"messages": TALK}, {"lora": training.Lora(rank=2)}, "validation_loss"),
        (PAIR, {"loss": "dpo", "beta": 0.2}, "reward_margin"),
    ],
)
def test_a_published_model_is_tuned_on_chats_and_on_preferences(row, fields, metric, tmp_path):
    folder = published_folder(tmp_path / "model", chat_template__jinja=TEMPLATE)
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    sizes = {"seq": 48, "batch": 2, "steps": 2, "log_every": 1, "validate_every": 2, "validation_batches": 1}
    tuned = published_recipe(str(folder), data=tmp_path / "rows.jsonl", sample_every=0, **sizes, **fields)
    run = train(tuned, tmp_path / "run", devices=jax.devices()[:1], screen=QUIET)
    assert run.step == 2 and metric in run.metrics
    saved = json.loads((run.folder / "recipe.json").read_text())["recipe"]
    assert saved["published"] == str(folder.absolute())
    assert saved["text"]["packing"] == ("pairs" if "loss" in fields else "documents")
    assert eqformer.load(run.folder).chat_template is not None


@pytest.mark.grid
def test_a_teacher_has_its_hidden_states_in_a_pipeline_that_reorders_layers(tmp_path):
    config = dataclasses.replace(CONFIG, layers=4)
    model = models.build(config, key=jax.random.key(0))
    tokenizer = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(model, tmp_path / "teacher", config=config, files=tokenizer)
    schedule = parallel.ParallelConfig(schedule="interleaved", chunks=2, microbatches=2)
    distilled = recipe("nowhere", teacher=tmp_path / "teacher", mesh=Mesh(pipe=2), plan=schedule)
    plan = make_plan(distilled, jax.devices()[:2])
    ids, weights = np.arange(4 * 32, dtype=np.int32).reshape(4, 32), np.ones((4, 32), np.float32)
    batch = eqformer.Batch(ids, ids, weights, np.arange(4, dtype=np.int32))

    def hidden_states(teacher, plan=None) -> np.ndarray:
        (taught,) = training.add_teacher([batch], teacher, plan)
        return np.asarray(taught.teacher_hidden)

    expected = hidden_states(model)
    teacher = load_teacher(distilled, plan, QUIET)
    np.testing.assert_allclose(hidden_states(teacher, plan), expected, rtol=1e-4, atol=1e-5)
    in_model_order = models.load(tmp_path / "teacher", plan=plan)  # the control
    assert np.abs(hidden_states(in_model_order, plan) - expected).max() > 0.1


@pytest.mark.grid
@pytest.mark.parametrize("source,lora", [("published", 0), ("from_run", 0), ("from_run", 2), ("neither", 0)])
def test_the_first_model_is_the_first_states_without_its_optimizer(source, lora, run, tmp_path):
    published = published_folder(tmp_path / "model")
    sources = {"published": {"published": published}, "from_run": {"from_run": run.folder}, "neither": {}}
    started = recipe("nowhere", lora=training.Lora(rank=lora), mesh=Mesh(fsdp=2), **sources[source])
    started = dataclasses.replace(started, plan=parallel.ParallelConfig(zero=3, smallest=1))
    plan, shapes = make_plan(started, jax.devices()[:2]), model_shapes(started)
    states = make_train_state(started, plan, make_optimizer(started, shapes), shapes)
    model, expected = init_run_model(started, states, QUIET), init_run_state(started, states, QUIET).model
    assert same_trees(model, expected)
    arrays, expected_arrays = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (model, expected))
    pairs = list(zip(arrays, expected_arrays, strict=True))
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)
    assert not all(x.is_fully_replicated for x in arrays)  # the control


def test_a_run_that_goes_back_at_a_spike_keeps_its_stored_arrays(tmp_path):
    options = Distillation(top=2)
    distilled = recipe("nowhere", teacher=tmp_path / "nowhere", distillation=options)
    plan = make_plan(distilled, jax.devices()[:1])

    def store_arrays(stored) -> None:
        texts = SimpleNamespace(loaders={"text": SimpleNamespace(stored=stored)})
        trainer: Any = SimpleNamespace(recipe=distilled, plan=plan, screen=QUIET, texts=texts)
        Trainer._store_arrays(trainer, training.Checkpointer(tmp_path / "checkpoints"))

    store_arrays("arrays")
    with pytest.raises(ValueError, match="nowhere"):  # the control: the teacher is loaded
        store_arrays(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(models.ModelConfig):
    """A config of one's own."""

    periods: int = 1


def build_own(config: OwnConfig, *, key) -> nn.Transformer:
    """Return a Llama with as many layers as there are periods."""
    return models.build(dataclasses.replace(CONFIG, layers=config.periods), key=key)


@pytest.mark.grid
def test_a_run_of_a_family_that_the_program_registers_goes_on(corpus, tmp_path):
    models.register(models.Family("own", OwnConfig, build_own, presets={}))
    with_own_config = recipe(corpus, model=OwnConfig(vocab=256, embed=32))
    devices = jax.devices()[:1]
    train(with_own_config, tmp_path / "run", devices=devices, screen=QUIET)
    assert train(with_own_config, tmp_path / "run", devices=devices, screen=QUIET).start == 3


@pytest.mark.quick
def test_recipes_have_names_and_paths_may_be_strings():
    assert (
        find_recipe("default").model == models.preset("lfm2-byte-500k")
        and find_recipe("adamw").optimizer.name == "adamw"
    )
    assert find_recipe("llama-byte-1m").model == models.preset("llama-byte-1m")
    with pytest.raises(ValueError, match="^--recipe defualt: there is no such recipe"):
        find_recipe("defualt")
    assert recipe("a/b") == recipe(Path("a/b")) != recipe("a/c")


def test_a_tokenizer_is_read_once_a_run_and_anew_by_the_next(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(data.ByteTokenizer().to_json())
    tokenized = recipe(None, text=Text(tokenizer=file))
    first, again = (recipe_tokenizer(complete_recipe(tokenized)) for _ in range(2))
    assert first is not again and recipe_tokenizer(tokenized) is again
    other_end = dataclasses.replace(tokenized, text=Text(tokenizer=file, end_of_text="A"))
    assert recipe_tokenizer(other_end).end_of_text == 65


def test_files_that_have_changed_since_an_earlier_run_are_read_anew(tmp_path):
    file = tmp_path / "rows.jsonl"
    for row, packing in (({"messages": TALK}, "documents"), ({"text": "a text"}, "windows")):
        file.write_text(json.dumps(row) + "\n")
        assert complete_recipe(recipe(file)).text.packing == packing


def test_the_peak_of_a_mesh_is_measured_once_in_a_process(monkeypatch):
    measured = []
    monkeypatch.setattr(planning, "mesh_peak", lambda mesh, dtype, *, seconds: measured.append((mesh, dtype)) or 1e9)
    _trainer._measure_peak.cache_clear()
    try:
        for mesh in (parallel.make_mesh(fsdp=number, devices=jax.devices()[:number]) for number in (1, 2, 1)):
            assert _trainer._measure_peak(mesh, "float32") == 1e9
        _trainer._measure_peak(mesh, "bfloat16")
    finally:
        _trainer._measure_peak.cache_clear()
    assert [(mesh.size, dtype) for mesh, dtype in measured] == [(1, "float32"), (2, "float32"), (1, "bfloat16")]


def test_a_terminal_without_rich_gets_lines(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich's own variable: this is a terminal
    assert Screen().console is not None
    monkeypatch.setitem(sys.modules, "rich.console", None)
    screen = Screen()
    with screen.steps(2, 0) as show:
        screen.note("a [note]")
        show(2, "loss 1.0", True)
    assert capsys.readouterr().out == "a [note]\nstep 2/2  loss 1.0  ETA -:--:--\n"
