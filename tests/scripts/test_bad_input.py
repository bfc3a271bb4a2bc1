"""Bad input ends a script with one clear message and exit code 2, and overwrites nothing."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import benchmark
import jax
import plan
import pretrain
import pytest
import sample
from script_helpers import command, learn_nothing, LLAMA, PLAIN, TINY, write_corpus
from support.command import parse

from eqformer import data
from eqformer.data._token_store import _map_store
from eqformer.recipes import RunDirectory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture
def refused(capsys):
    """Runs a command line in this process and returns the message of its refusal."""

    def message(*arguments, main=pretrain.main):
        if main is pretrain.main and not any(str(argument)[:6] in ("--mesh", "--simu") for argument in arguments):
            arguments = (*arguments, "--simulate", 1)
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert (error.count("error:") == 1) != ("For full helptext" in error) and "Traceback" not in error
        return error

    return message


@pytest.mark.parametrize(
    "arguments,words",
    [
        ("--recipe defualt", ["--recipe defualt", "default, llama, moe, adamw"]),
        ("--model.embd 64", ["model.embd", "--model.embed"]),
        ("--steps many", ["steps", "many"]),
        ("--optimizer.lr 1e-3", ["--optimizer.lr: there is no such flag; use --optimizer.learning-rate instead"]),
        (
            "--no-optimizer.decay-tables",
            ["--no-optimizer.decay-tables: there is no such flag; use --optimizer.no-decay-tables instead"],
        ),
        ("--accumulate 4", ["--accumulate: there is no such flag; use --microbatches instead"]),
        ("--batch-size=8", ["--batch-size: there is no such flag; use --batch instead"]),
        (
            "--text.tokenizer {file} --model.vocab 255",
            ["--model.vocab 255 --text", "tokenizer has 256 ids"],
        ),
        ("--text.tokenizer {file} --text.round-vocab 0", ["--text.round-vocab 0", "at least 1"]),
        ("--model {run}", ["--model", "this is the folder of a run", "scripts/convert.py", "--run-dir"]),
        (
            "--model.heads 8 --model.kv-heads 3",
            ["--model.heads 8 --model.kv-heads 3", "heads=8, kv_heads=3", "[1, 2, 4, 8]"],
        ),
        ("--recipe gpt2-byte-1m --model.embed 100", ["embed=100, heads=8", "divide"]),
        ("--batch 16 --microbatches 3", ["--microbatches 3 --batch 16", "multiple of 3 rows"]),
        (
            "--recipe t5-byte-200k",
            ["error: --recipe t5-byte-200k: ", "the model has an encoder", "data.batch_pairs(sources, targets)"],
        ),
        (
            "--recipe modernbert-byte-200k",
            ["error: --recipe modernbert-byte-200k: ", "in stacks[0]", "a token attends to later tokens"],
        ),
        ("--recipe gpt2-byte-1m --seq 1024", ["--seq 1024", "512 learned positions"]),
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--sample-every -1", ["--sample-every -1", "0 for none"]),
        ("--evaluate-every -1 --evaluate-text README.md", ["--evaluate-every -1", "0 for none"]),
        ("--evaluate-every 5", ["--evaluate-every 5", "give --evaluate-every N with --evaluate-text FILE"]),
        ("--evaluate-text README.md", ["--evaluate-every 0", "an evaluation needs an interval"]),
        ("--evaluate-every 5 --evaluate-text no.txt", ["--evaluate-text no.txt: ", "no file or folder no.txt"]),
        (
            "--evaluate-every 5 --evaluate-text {file} --evaluate-limit 0",
            ["--evaluate-limit 0: give a number of documents"],
        ),
        ("--evaluate-every 5 --evaluate-text README.md --evaluate-chat", ["--evaluate-chat: the model has no chat"]),
        ("--optimizer.learning-rate -1", ["peak=-1", "positive"]),
        ("--optimizer.paths sublayer=sgd", ["--optimizer.paths sublayer=sgd: ", "the nearest are sublayers[1]"]),
        ("--optimizer.paths embedding=muon", ["--optimizer.paths embedding=muon: ", "embedding.weight is a table"]),
        ("--optimizer.paths norm=adam", ["NAME is adamw, schedule-free-adamw, muon", "the nearest name is adamw"]),
        ("--precision.products int8", ["error: --precision.products int8: ", "compute", "fp8"]),
        ("--precision.compute int8", ["error: --precision.compute int8: ", "floating-point", "bfloat16 (bf16)"]),
        ("--data no/such/folder", ["no/such/folder"]),
        ("--text.tokenizer no/such.json", ["no/such.json"]),
        ("--data README.md --text.hub someone/texts", ["README.md", "someone/texts", "only one of these"]),
        ("--data docs --text.mix README.md=1", ["--data docs --text.mix README.md=1: a run reads only one of these"]),
        ("--text.mix docs=1 README.md", ["--text.mix README.md: give PATH=WEIGHT"]),
        ("--text.mix docs=1 README.md=0", ["--text.mix README.md=0", "the weight is above 0"]),
        ("--text.mix docs=-1 README.md=1", ["--text.mix docs=-1", "the weight is above 0"]),
        ("--text.mix docs=1 README.md=nan", ["--text.mix README.md=nan", "the weight is above 0"]),
        ("--text.mix docs=1 =1", ["--text.mix =1", "give PATH=WEIGHT"]),
        ("--text.mix docs=1 hub:=1", ["--text.mix hub:=1", "or hub:NAME=WEIGHT"]),
        ("--loss kto --text.mix docs=1 hub:a/b=1", ["--loss kto --text.mix hub:a/b=1: ", "give files or folders"]),
        ("--text.mix docs=1 docs=2", ["--text.mix docs=1 docs=2", "named twice"]),
        (
            "--text.mix docs=1 no/such/one=1",
            ["--text.mix docs=1 no/such/one=1 ", "files('no/such/one'", "no file or folder no/such/one"],
        ),
        ("--text.mix docs=1 {empty}=1", ["--text.mix docs=1 ", "all 1 files are empty"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(arguments, words, refused, tmp_path):
    named = {"file": tmp_path / "tokenizer.json", "run": tmp_path / "old", "empty": tmp_path / "empty.txt"}
    named["empty"].touch()
    named["file"].write_text(data.ByteTokenizer().to_json())
    named["run"].mkdir()
    (named["run"] / "recipe.json").write_text("{}")
    error = refused("--run-dir", tmp_path / "run", *arguments.format(**named).split())
    assert all(word in error for word in words), error
    assert error.startswith("error: --") or "For full helptext" in error  # the flags that it is about come first
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments,words",
    [
        ("--mesh.tensor 16", ["--mesh.tensor 16", "16 devices", "there are 8", "--simulate 16"]),
        ("--mesh.fsdp 0", ["--mesh.fsdp 0", "at least one device"]),
        ("--mesh.replica 1", ["1 devices", "7 of 8 devices would be left over", "replica=8"]),
        ("--mesh.fsdp 4", ["--mesh.fsdp 4", "4 of 8 devices would be left over", "replica=2"]),
        ("--mesh.fsdp 8 --simulate 4", ["--mesh.fsdp 8", "there are 4"]),
        ("--simulate 16 --mesh.fsdp 16", ["--simulate 16", "8 cpu devices"]),
        ("--simulate 0", ["--simulate 0", "at least 1"]),
        ("--mesh.tensor 8 --model.heads 12 --model.embed 96", ["--mesh.tensor 8", "'heads'", "12", "8 devices"]),
        ("--mesh.fsdp 8 --batch 12", ["--mesh.fsdp 8", "12 rows", "multiple of 8"]),
        ("--mesh.fsdp 8 --microbatches 4", ["--mesh.fsdp 8 --microbatches 4", "16 rows", "multiple of 32"]),
        ("--mesh.context 8 --seq 250", ["--mesh.context 8", "250 tokens", "multiple of 16"]),
        ("--mesh.context 2 --mesh.tensor 4 --residual sequence --seq 36", ["'sequence'", "18 tokens", "multiple of 8"]),
        ("--mesh.pipe 8", ["--mesh.pipe 8", "layers=4", "more parts than layers", "take 8 layers"]),
        (
            "--mesh.pipe 4 --mesh.replica 2 --schedule looping --microbatches 2",
            ["--schedule looping", "microbatches=2", "at least 4"],
        ),
        (
            "--mesh.pipe 2 --mesh.fsdp 4 --schedule interleaved --chunks 2 --microbatches 3",
            ["--schedule interleaved", "microbatches=3", "2 or 4"],
        ),
        ("--mesh.pipe 2 --mesh.fsdp 4 --chunks 2", ["--chunks 2", "1f1b has one chunk"]),
        ("--mesh.context 8 --context-method heads --model.heads 4", ["--context-method heads", "4 query heads"]),
        ("--mesh.tensor 8 --overlap ring", ["--overlap ring", "replicated", "residual='sequence'"]),
        ("--mesh.tensor 8 --zero 4", ["invalid choice '4'", "--zero"]),
        ("--process-id 2 --processes 2 --coordinator localhost:1", ["--process-id 2 --processes 2", "from 0 to 1"]),
        ("--coordinator localhost:1", ["--coordinator localhost:1", "--processes and --process-id"]),
        ("--processes 2 --process-id 0", ["--processes 2 --process-id 0", "give --coordinator"]),
        ("--coordinator here --processes 2 --process-id 0", ["--coordinator here", "host:port"]),
    ],
)
@pytest.mark.parametrize("main", [pretrain.main, pytest.param(plan.main, marks=pytest.mark.grid)])
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(main, arguments, words, refused, tmp_path):
    if main is plan.main and any("left over" in word or "there are" in word or "cpu" in word for word in words):
        return  # plan.py needs no devices
    run_flags = () if main is plan.main else ("--run-dir", tmp_path / "run")
    error = refused(*run_flags, "--recipe", "llama", *arguments.split(), main=main)
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments,words",
    [
        ("--only layouts", ["layouts", "8 devices", "there are 1", "--simulate 8"]),
        ("--only layouts speed", ["--only speed: the benchmarks are train, decode", "gpu"]),
        ("--simulate 4 --only train communication", ["communication", "there are 4"]),
        ("--simulate 0", ["--simulate 0", "at least 1"]),
        ("--rounds 0", ["--rounds 0", "at least 1"]),
        pytest.param("--only gpu", ["--only gpu", "JAX computes on cpu", "eqformer[cuda]"], marks=pytest.mark.grid),
    ],
)
def test_a_benchmark_that_cannot_be_measured(arguments, words, refused, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])
    error = refused(*arguments.split(), main=benchmark.main)
    assert all(word in error for word in words), error


@pytest.mark.grid
def test_a_checkpoint_of_another_model(refused, corpus, tmp_path):
    # A constant rate, so that the run may be longer than it was.
    arguments = ["--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--optimizer.rates", "constant"]
    pretrain.main([str(argument) for argument in [*arguments, "--steps", 3, "--simulate", 1]])
    recipe = tmp_path / "run" / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"mlp": 64', '"mlp": 96'))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    error = refused(*arguments, "--model.mlp", 96, "--mesh.tensor", 2, "--mesh.fsdp", 4, "--mesh.replica", 1)
    assert "checkpoints/3: this checkpoint was trained by another recipe" in error and "model.mlp: 64 -> 96" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_vocabulary_smaller_than_a_token_id(refused, corpus, tmp_path):
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--model.vocab", 64)
    assert "--model.vocab 64: bytes have 256 ids" in error and not (tmp_path / "run").exists()


def test_empty_and_unreadable_data(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused("--run-dir", tmp_path / "a", "--data", tmp_path / "empty")
    (tmp_path / "bad").mkdir()
    for number in range(30):
        (tmp_path / "bad" / f"{number}.txt").write_bytes(b"\xff\xfe\x00 not utf-8")
    error = refused("--run-dir", tmp_path / "b", "--data", tmp_path / "bad", *TINY, *LLAMA)
    assert ".txt" in error and "UTF-8" in error


def test_rows_longer_than_the_text(refused, corpus, tmp_path):
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--seq", 10**6)
    assert "seq=1000000" in error


def test_a_folder_of_another_recipe_and_a_folder_that_is_no_run(refused, corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    error = refused("--run-dir", tmp_path / "other", "--data", corpus)
    assert "holds other things than a run" in error
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    begun = parse(pretrain.Command, [*TINY, *LLAMA, "--data", str(corpus), "--seq", "1000000"])
    with RunDirectory(tmp_path / "run") as directory:
        directory.claim(begun.recipe, begun.run)
        directory.begin(begun.recipe, begun.run)
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)  # without a step the folder would be open to another
    recipe = (tmp_path / "run" / "recipe.json").read_text()
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--model.embed", 64)
    assert "model.embed: 32 -> 64" in error and "seq: 1000000 -> 32" in error
    assert (tmp_path / "run" / "recipe.json").read_text() == recipe
    of_old = json.loads(recipe)
    of_old["recipe"]["accumulate"] = 2  # as one wrote before
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(of_old))
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA)
    assert "Recipe has no fields ['accumulate']; it was written by another version" in error
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({"name": "default"}))
    assert "not a recipe that a run wrote" in refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA)


@pytest.mark.grid
def test_a_truncated_checkpoint_is_an_error_and_never_a_new_start(refused, corpus, tmp_path):
    # A constant rate, so that the run may be longer than it was.
    arguments = ["--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--optimizer.rates", "constant"]
    pretrain.main([str(argument) for argument in [*arguments, "--steps", 3, "--simulate", 1]])
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    largest = max((tmp_path / "run" / "checkpoints" / "3").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    for error in (refused(*arguments), refused("--run-dir", tmp_path / "run", main=sample.main)):
        assert str(tmp_path / "run" / "checkpoints" / "3") in error and largest.name in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "number,fix",
    [(errno.EACCES, "make it writable"), (errno.EROFS, "make it writable"), (errno.ENOSPC, "free some space")],
)
def test_a_folder_that_cannot_be_written_is_named_by_what_it_is(number, fix, refused, corpus, tmp_path, monkeypatch):
    def no(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RunDirectory, "_acquire_lock", no)
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA)
    assert "the folder cannot be written" in error and os.strerror(number) in error
    assert [words in error for words in ("make it writable", "free some space")] == [fix[0] == "m", fix[0] == "f"]


def test_sampling_where_there_is_no_run(refused, tmp_path):
    assert "there is no run (no recipe.json)" in refused("--run-dir", tmp_path, main=sample.main)


@pytest.mark.grid
@pytest.mark.parametrize("limit,place", [(4_000, "data"), (60_000, "checkpoints")])
def test_a_full_disk_is_reported_and_leaves_nothing_half_written(limit, place, corpus, tmp_path):
    # A limit on the size of a file fails writes as a full disk does, for any user.
    limited = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2)"
    program = [sys.executable, "-c", limited + "; os.execv(sys.argv[1], sys.argv[1:])"]
    arguments = command("pretrain.py", "--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA)
    # Without bytecode: Python itself would leave files of it cut short, which the next process could not import.
    unwritten = PLAIN | {"PYTHONDONTWRITEBYTECODE": "1", "EQFORMER_TOKENS": str(tmp_path / "tokens")}
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=300, env=unwritten)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error:") == 1 and place in done.stderr and "File too large" in done.stderr, done.stderr
    folder = tmp_path / "run" / place
    assert not folder.exists() or not [path for path in folder.iterdir() if path.name[0].isalnum()]
    if place == "data":
        # The split that fits is whole, with checksums that agree, and of the other nothing is there.
        stores = [path for path in (tmp_path / "tokens").iterdir() if path.name[0].isalnum()]
        assert all(len(_map_store(path, verify=True).tokens) for path in stores) and len(stores) <= 1


def contents(folder: pathlib.Path) -> dict[str, bytes | None]:
    """Every file and folder below a folder with its content, but for locks, whose content is a process's own."""
    paths = (path for path in folder.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def test_a_refused_run_leaves_its_folder_as_it_was(refused, corpus, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"title": "no text"}\n' * 40)
    (tmp_path / "one.txt").write_text("a")
    fields = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "intermediate_size": 64, "rms_norm_eps": 1e-5}
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(fields))
    # A file where the shared folder of tokens would be, so that tokens are made in the run's own folder.
    monkeypatch.setenv("EQFORMER_TOKENS", str(tmp_path / "one.txt"))
    learn_nothing(monkeypatch)  # a thread compiles the step while weights are read
    good = ["--data", corpus, *TINY, *LLAMA]
    for words, arguments in {
        "has no field 'text'": ["--data", tmp_path / "rows.jsonl", *TINY, *LLAMA],
        "must have a document with text": ["--data", tmp_path / "one.txt", *TINY, *LLAMA],
        "no model.safetensors": ["--model", tmp_path / "published", "--data", corpus, "--steps", 2],
    }.items():
        assert words in refused("--run-dir", tmp_path / "runs" / "new", *arguments)
        assert not (tmp_path / "runs").exists(), words
    (tmp_path / "run").mkdir()
    refused("--run-dir", tmp_path / "run", *good, "--seq", 10**6)
    assert not list((tmp_path / "run").iterdir())
    begun = parse(pretrain.Command, [str(word) for word in good])
    with RunDirectory(tmp_path / "run") as directory:
        directory.claim(begun.recipe, begun.run)
        directory.begin(begun.recipe, begun.run)
        with RunDirectory(directory.path) as other, pytest.raises(ValueError, match="another process is running here"):
            other.claim(begun.recipe, begun.run)
    (tmp_path / "run" / "checkpoints" / "6").mkdir(parents=True)  # a damaged checkpoint, of the last step
    before = contents(tmp_path / "run")
    for words, arguments in {"manifest.json is missing": good, "seq: 32 -> 16": [*good, "--seq", 16]}.items():
        assert words in refused("--run-dir", tmp_path / "run", *arguments)
        assert contents(tmp_path / "run") == before != {}, words
