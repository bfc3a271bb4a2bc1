"""Flags: help that fits on a screen, names from other libraries, and library errors that name flags."""

import ast
import dataclasses
import inspect
import json
import re
from itertools import pairwise
from pathlib import Path

import plan
import pretrain
import pytest
import reinforce
import sample
from script_helpers import SCRIPTS
from support.command import GROUPS, parse, read
from support.flags import check_names, USUAL_NAMES

from eqformer import data, models, nn, parallel, training
from eqformer.recipes import check, find_recipe, flags_of, LARGE, RECIPES
from eqformer.recipes._recipe import add_flags, FLAGS_OF_CALLS


def page(kind, capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        parse(kind, arguments, HIDDEN if kind is plan.Command else ())
    assert exit.value.code == 0
    return capsys.readouterr().out


def of_recipe(kind, name="default"):
    return flags_of(kind(name, find_recipe(name)))


HIDDEN = ("the run",)  # groups that plan.py's --help leaves out
PLAN_FLAGS = "--topology --memory --decode --cache-dtype --search --formulas --compile --json --picture"


@pytest.mark.parametrize("kind", [pretrain.Command, plan.Command])
def test_help_fits_on_a_screen_and_help_all_has_every_flag(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["scripts/pretrain.py"])
    short, whole = page(kind, capsys, "--help"), page(kind, capsys, "--help-all")
    lines, all_flags = short.splitlines(), {*re.findall(r"--[a-z][a-z0-9.-]*", whole)}
    assert len(lines) <= 45 and max(map(len, lines)) <= 80
    shown = re.findall(r"^  (--[a-z.-]+)", short, re.MULTILINE)
    groups = [group for heading, group in GROUPS.items() if kind is not plan.Command or heading not in HIDDEN]
    chosen = [named.split()[0] for group in groups for named in group.split(", ")]
    plan_flags = PLAN_FLAGS.split() if kind is plan.Command else []
    expected = [flag for flag in chosen if flag in of_recipe(kind)] + plan_flags
    assert shown == expected and len(expected) >= 25
    assert ("--memory MEMORY " in short) == (kind is plan.Command) and all(name in whole for name in LARGE)
    monkeypatch.setenv("COLUMNS", "100")  # in one column
    letters = lambda text: re.sub(r"\W", "", text)
    words = letters(page(kind, capsys, "--help-all"))
    assert all(letters(re.split(" {2,}", line)[-1]) in words for line in lines if line.startswith("  --"))
    no_flags = {"--model.scaling"}  # a table of a published model
    assert (
        {*of_recipe(kind)} - no_flags <= all_flags and {*expected} <= all_flags and len(expected) < len(all_flags) / 2
    )
    order = [short.index(f"\n{heading}:\n") for heading in ("model", "text", "training", "devices")]
    assert order == sorted(order)
    assert whole.index("--model.embed") < whole.index("--text.packing") < whole.index("--mesh.fsdp")
    assert f"--steps {RECIPES['default']().steps} " in short and page(kind, capsys, "--steps", "7", "-h") == short


def test_help_of_reinforce_shows_no_flag_that_it_refuses(capsys):
    with pytest.raises(SystemExit):
        reinforce.main(["--help"])
    short = capsys.readouterr().out
    refused = [flag for flag in reinforce.HIDDEN if f"\n  {flag} " in short]
    assert not refused and "\n  --checkpoint-every " in short
    assert all(f"\n  {flag} " in page(pretrain.Command, capsys, "--help") for flag in reinforce.HIDDEN)  # the control


@pytest.mark.quick
def test_help_knows_the_recipe_that_is_asked_for(capsys):
    assert "--optimizer.name adamw " in page(pretrain.Command, capsys, "--recipe", "adamw", "--help")


def elsewhere():
    """Each row of the vocabulary's table of names elsewhere: our flag, and what other programs call it."""
    page = (SCRIPTS.parent / "docs" / "vocabulary.md").read_text().partition("## Names elsewhere")[2]
    rows = [line.split("|")[1:-1] for line in page.partition("## ")[0].splitlines() if line.startswith("| ")][1:]
    words = [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]
    return {own[-1]: [cell[-1] for cell in others if cell] for own, *others in words}


def test_names_of_the_vocabularys_table_are_answered_with_our_flags():
    flags = of_recipe(pretrain.Command)
    assert len(elsewhere()) >= 19 and all(elsewhere().values())
    for own, others in elsewhere().items():
        for name in others:
            with pytest.raises(ValueError, match=f"use {own} instead"):
                check_names([f"--{name.removeprefix('--')}=1"], flags)
    check_names(["--names-of-nobody=1"], flags)  # is left to the parser


def test_names_from_elsewhere_are_of_flags_that_exist():
    names = (*RECIPES, "gpt2-byte-1m", "jaxformer-byte-1m")  # whose models have other fields
    commands = sample.Command, plan.Command, reinforce.Command
    ours = [of_recipe(pretrain.Command, name) for name in names] + [*map(flags_of, commands)]
    known = {flag for flags in ours for flag in flags}
    assert {*USUAL_NAMES} <= known
    names = [name for others in USUAL_NAMES.values() for name in others.split()]
    assert not {name for name in names if names.count(name) > 1}
    assert {flag for flags in FLAGS_OF_CALLS.values() for flag in flags} <= known


def unknown_flags(page):
    """Return the flags in a page's tables and commands, of our column alone, that pretrain.py and plan.py lack."""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `") or line.startswith("| |")]
    cells = [cell for row in rows for cell in (row[2:3] if len(row) > 2 else row[1:])]
    commands = re.findall(r"^python scripts/(?:pretrain|plan)\.py (?:.*\\\n)*.*", page, re.MULTILINE)
    known = {
        flag
        for name in ("default", "moe")
        for kind in (pretrain.Command, plan.Command)
        for flag in of_recipe(kind, name)
    }
    return {flag for text in [*cells, *commands] for flag in re.findall(r"--[a-z][a-z.-]*", text)} - known


@pytest.mark.parametrize("name", ["from_transformers.md", "from_maxtext_or_megatron.md"])
def test_flags_on_pages_for_users_of_other_programs_exist(name):
    page = (SCRIPTS.parent / "docs" / name).read_text()
    assert unknown_flags(page) == set()
    assert unknown_flags(page.replace("--mesh.fsdp", "--mesh.dp")) == {"--mesh.dp"}  # the comparison can fail


@pytest.mark.parametrize(
    "given,ours",
    [
        ("--optimizer.lr", "--optimizer.learning-rate"),
        ("--lr=3", "--optimizer.learning-rate"),
        ("--learning_rate", "--optimizer.learning-rate"),  # a flag's own last part
        ("--model.hidden_size", "--model.embed"),
        ("--kv-heads", "--model.kv-heads"),
        ("--max-steps", "--steps"),
        ("--lr-schedule", "--optimizer.rates"),
        ("--optimizer.schedule", "--optimizer.rates"),  # and not the pipeline's --schedule
        ("--tp", "--mesh.tensor"),
    ],
)
def test_a_flag_that_is_called_otherwise_elsewhere(given, ours):
    with pytest.raises(
        ValueError, match=f"^{re.escape(given.partition('=')[0].replace('_', '-'))}: .* use {ours} instead"
    ):
        parse(pretrain.Command, [given, "1"])


@pytest.mark.parametrize("given", [["--run_dir", "a_b"], ["--run_dir=a_b"], ["--run-dir", "a_b"]])
def test_names_of_flags_may_have_underscores_and_values_keep_theirs(given):
    assert parse(pretrain.Command, given).run_dir == Path("a_b")
    assert read(sample.Command, [*given, "--top_k", "3", "--prompt", "_--a_b=c_d"]).prompt == "_--a_b=c_d"
    rate = parse(pretrain.Command, [*given, "--optimizer.learning_rate=1e-1", "--text.round_vocab", "2"]).run
    assert (rate.optimizer.learning_rate, rate.text.round_vocab) == (0.1, 2)


def test_fields_without_a_flag_keep_the_recipes_values():
    """The parser makes the flags of those fields alone that the command line sets."""
    words = "--steps 7 --optimizer.warmup 3 --optimizer.no-decay-tables --mesh.fsdp 2 --zero 3 --data docs".split()
    run, default = parse(pretrain.Command, words).run, parse(pretrain.Command, []).run
    assert (run.steps, run.optimizer.warmup, run.mesh.fsdp, run.plan.zero) == (7, 3, 2, 3)
    assert (run.data, run.optimizer.decay_tables) == (Path("docs"), False) and default.optimizer.decay_tables
    back = {name: getattr(default, name) for name in ("steps", "optimizer", "mesh", "plan", "data")}
    assert run != default and dataclasses.replace(run, **back) == default


def test_help_of_a_field_is_one_line():
    # Lines after the first are indented, and the parser breaks the text there.
    documented = 0
    kinds = training.Optimization, training.Lora, nn.Execution, parallel.ParallelConfig
    of_kinds = [Path(inspect.getfile(kind)) for kind in kinds]
    for path in [*SCRIPTS.glob("*.py"), *SCRIPTS.glob("[rs]*/*.py"), *of_kinds]:
        for node in ast.walk(ast.parse(path.read_text())):
            for field, words in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
                if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr):
                    documented += 1
                    assert "\n" not in ast.literal_eval(words.value), (path, ast.unparse(field.target))
    assert documented > 60


def test_a_preset_is_trained_by_adamw_in_800_steps():
    chosen = find_recipe("llama-byte-1m")
    assert (chosen.optimizer.name, chosen.steps) == ("adamw", 800)
    with pytest.raises(ValueError, match=r"each preset of eqformer.models is a recipe, too \(AdamW, 800 steps\)"):
        find_recipe("defualt")


def test_no_recipe_hides_a_preset():
    assert not {*RECIPES, *LARGE} & {*models.presets()}


def test_flags_that_are_there_are_no_other_names():
    for name in RECIPES:
        flags = of_recipe(pretrain.Command, name)
        assert not [flag for flag in flags if any(flag[2:] in others.split() for others in USUAL_NAMES.values())]
    with pytest.raises(ValueError, match="--max-new-tokens: .* use --tokens instead"):
        read(sample.Command, ["--max-new-tokens", "3"])
    assert read(sample.Command, ["--tokens", "3", "--dtype", "bf16", "--prompt", "a --b"]).tokens == 3


@pytest.mark.parametrize(
    "message,flags",
    [
        ("Attention(heads=8, kv_heads=3): no", "--model.heads 8 --model.kv-heads 4: "),
        ("warmup_cosine(peak=-1.0): no", "--optimizer.learning-rate 0.02: "),
        ("rates('cosine', decay=3): no", "--optimizer.rates warmup-stable-decay: "),
        ("check_vocab(store, vocab=64): no", "--model.vocab 256: "),
        ("Loader(store, seq=1, batch=2, packing='windows'): no", "--seq 256 --batch 16 --text.packing windows: "),
        ("preference_loss('dpo', beta=-1.0): no", "--beta 0.1: "),
        ("distillation_loss('jsd', weight=0.5, beta=2.0): no", "--distillation.weight 0.5 --distillation.beta 0.5: "),
        ("make_step(microbatches=3): the batch of 16 rows", "--microbatches 1: "),
        ("a message of another form: a=3", ""),
        ("--batch 3: seq=4", ""),
        ("FileTokenizer('x', end_of_text=None): no", ""),  # neither flag is set
        ("TopP(3): no", ""),  # another command's
    ],
)
def test_errors_of_the_library_name_flags(message, flags):
    assert add_flags(message, of_recipe(pretrain.Command, "llama")) == flags + message


@pytest.mark.parametrize(
    "message, flags",
    [
        ("Rollouts(rows=[...]): each row has a prompt", "--data prompts.jsonl: "),
        ("Rollouts(reward=high): for step 1", "--reward high.py: "),
        ("Rollouts(max_new_tokens=64): the longest prompt", "--tokens 64: "),
        ("Rollouts(llm): this model has an encoder", ""),
    ],
)
def test_errors_of_rollouts_name_the_flags_of_their_arguments_alone(message, flags):
    values = of_recipe(reinforce.Command) | {"--data": "prompts.jsonl", "--reward": "high.py"}
    assert add_flags(message, values) == flags + message


def test_a_tokenizer_sets_the_vocabulary(tmp_path):
    file = tmp_path / "tokenizer.json"
    written = json.loads(data.ByteTokenizer().to_json())
    written["added_tokens"] += [{**written["added_tokens"][0], "id": 256, "content": "<more>"}]
    file.write_text(json.dumps(written))
    vocab = lambda *more: parse(pretrain.Command, ["--text.tokenizer", str(file), *more]).run.model.vocab
    assert data.FileTokenizer(file).vocab == 257
    assert (vocab(), vocab("--text.round-vocab=128"), vocab("--model.vocab", "1000")) == (257, 384, 1000)
    assert vocab("--recipe", "gpt2-byte-1m") == 257
    assert parse(pretrain.Command, []).run.model == models.preset("lfm2-byte-500k")
    with pytest.raises(ValueError, match="--model.vocab 256 --text.tokenizer .* the tokenizer has 257 ids"):
        check(parse(pretrain.Command, ["--text.tokenizer", str(file), "--model.vocab", "256"]).run)
    with pytest.raises(ValueError, match="^--text.tokenizer .*none.json: FileTokenizer"):
        parse(pretrain.Command, ["--text.tokenizer", str(tmp_path / "none.json")])
