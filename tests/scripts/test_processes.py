"""Two real processes train one model, on texts and on rewards: they stop, save, resume and raise errors together."""

import json
import re
import signal
import socket
import sys

import pretrain
import pytest
from jax._src.clusters import ClusterEnv
from script_helpers import LLAMA, losses, rows, run_here, start, start_code, TINY, wait_until, write_corpus
from support.command import parse
from support.processes import connect, Machine
from text_cases import published_folder

from eqformer.recipes import RunDirectory
from eqformer.training import Checkpointer


# A constant rate, so that where the run ends does not matter to its beginning.
RUN = [*TINY, *LLAMA, "--batch", "8", "--optimizer.rates", "constant", "--checkpoint-every", "100000"]
RUN += ["--validate-every", "100000", "--sample-every", "100000"]
MESH = "--mesh.fsdp 2 --mesh.replica 2 --mesh.tensor 2 --zero 3 --simulate 4".split()
SMALL_MESH = "--mesh.fsdp 2 --mesh.tensor 2 --zero 3 --simulate 2".split()
OTHER_RECIPE = "--seed 7 --mesh.fsdp 1 --mesh.replica 2".split()
# Several command lines one after another, in processes that have met once: most of a short run is its beginning.
SEVERAL = """
import json, sys
from support import environment
environment.prepare(["--simulate", "2"])
import pretrain
from support.processes import connect, Machine
from eqformer import planning

planning.mesh_peak = lambda *_, **__: 1e9  # a second of each processor
connect(Machine(2, sys.argv[1], 2, int(sys.argv[2])))
for command in json.loads(sys.argv[3]):
    try:
        pretrain.main(command)
    except SystemExit as end:
        assert end.code == 2
"""


def coordinator():
    """Where processes can meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def both(*arguments, more=()):
    """Two processes begun; the second with some arguments more."""
    meet = ["--coordinator", coordinator(), "--processes", 2, "--process-id"]
    return [start("pretrain.py", *arguments, *own, *meet, number) for number, own in enumerate([(), more])]


def outputs(processes, code=0, stop_in=None):
    """What they have printed, once both have ended with this code; lines of the library that connects them left out,
    and the numbers that two of them leave behind where they are written at once.

    With `stop_in`, a run's folder, the second is asked to stop when the run is there at step 3.
    """
    try:
        if stop_in is not None:
            wait_until(stop_in, 3, processes[0])
            processes[1].send_signal(signal.SIGTERM)
        texts = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [code, code], "\n".join(texts)
    return ["".join(re.findall(r"^(?!\[Gloo\]|.*peer ranks|\d+$).*\n", text, re.MULTILINE)) for text in texts]


@pytest.mark.grid
def test_two_processes_refuse_together_train_and_stop_together(tmp_path):
    run = ["--data", write_corpus(tmp_path / "corpus"), *RUN, *SMALL_MESH, "--model.layers", 1, "--sample-every", 0]
    run += ["--execution.core", "reference", "--execution.remat", "none", "--steps", 100_000]
    mine, folders = ["--run-dir", tmp_path / "run", *run], [tmp_path / "run", tmp_path / "other"]
    folders[1].mkdir()
    (folders[1] / ".lock").write_text("an earlier run's")
    commands = [
        [[*mine, *own], [*run, "--run-dir", folder], ["--run-dir", tmp_path / "corpus", *run], mine]
        for own, folder in zip([(), OTHER_RECIPE], folders)
    ]
    where = coordinator()
    lines = [json.dumps([list(map(str, command)) for command in each]) for each in commands]
    processes = [start_code(SEVERAL, where, number, line) for number, line in enumerate(lines)]
    texts = outputs(processes, stop_in=tmp_path / "run")

    (step,) = Checkpointer(tmp_path / "run" / "checkpoints").steps
    assert f"stopped at step {step} of 100000; the checkpoint is saved" in texts[0]
    assert len(losses(tmp_path / "run")) == step
    for text, folder in zip(texts, folders):
        assert text.count("error: ") == 3
        assert "process 1 differs from process 0 in --seed, --mesh; start all" in text
        assert f"process 1 differs from process 0 in --run-dir {folder}; start all" in text
    assert "holds other things than a run" in texts[0] and "process 0 failed, so this" in texts[1]
    assert [path.name for path in folders[1].iterdir()] == [".lock"]


@pytest.mark.grid
def test_two_processes_stop_together_and_go_on_as_one_process_would(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    run = ["--data", write_corpus(tmp_path / "corpus"), *RUN]
    processes = both("--run-dir", two, *run, *MESH, "--steps", 100_000)
    first, second = outputs(processes, stop_in=two)
    (step,) = Checkpointer(two / "checkpoints").steps
    assert f"stopped at step {step} of 100000; the checkpoint is saved" in first and not second.strip()
    assert len(losses(two)) == step
    first, second = outputs(both("--run-dir", two, *run, *MESH, "--steps", step + 5))
    assert f"goes on at step {step}" in first and not second.strip()
    assert Checkpointer(two / "checkpoints").steps == [step, step + 5]
    pretrain.main([str(each) for each in ["--run-dir", one, *run, "--simulate", 1, "--steps", step + 5]])
    assert losses(two) == pytest.approx(losses(one), rel=1e-5) and len(losses(one)) == step + 5
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()


@pytest.mark.grid
@pytest.mark.parametrize(
    "more,word", [(OTHER_RECIPE, "in --seed, --mesh;"), (["--simulate", "4"], "processes 0, 1 have 2, 4 devices")]
)
def test_processes_that_differ_end_together_with_nothing_written(more, word, tmp_path):
    texts = outputs(both("--run-dir", tmp_path / "run", *RUN, *SMALL_MESH, more=more), code=2)
    assert all(text.count("error: ") == 1 and word in text for text in texts), texts
    assert not list(tmp_path.iterdir())


@pytest.mark.grid
@pytest.mark.parametrize(
    "file,reason",
    [
        ("metrics.jsonl", "it is a folder, and only regular files are read"),
        ("loss.part.png", "Is a directory"),
        ("samples.part.txt", "Is a directory"),
    ],
)
def test_what_the_first_process_cannot_write_ends_both(file, reason, tmp_path):
    """With a folder where the file should be, as nobody else writes it."""
    run = ["--data", write_corpus(tmp_path / "corpus"), "--run-dir", tmp_path / "run", *RUN, *SMALL_MESH]
    command = parse(pretrain.Command, list(map(str, run)))
    with RunDirectory(tmp_path / "run") as directory:
        directory.claim(command.recipe, command.run)
        directory.begin(command.recipe, command.run)
    (tmp_path / "run" / file).mkdir()
    first, second = outputs(both(*run), code=2)
    assert reason in first and "process 0 failed, so this" in second


REWARDS = """
import os, pathlib

def high(prompts, completions, log):
    with pathlib.Path(log[0]).open("a") as calls:
        calls.write(f"{os.getpid()}\\n")
    return [sum(ord(character) > 127 for character in text) / 8 for text in completions]

def broken(prompts, completions, log):
    return {}["answer"]
"""


@pytest.mark.grid
def test_two_processes_sample_together_as_one_process_would(tmp_path):
    published_folder(tmp_path / "M")
    (tmp_path / "rewards.py").write_text(REWARDS)
    run = "--batch 8 --group 4 --tokens 8 --seq 16 --log-every 1 --checkpoint-every 2 --sample-every 4 --updates 2"
    run += " --kl-weight 0.01 --resample 1 --validate-every 4 --optimizer.learning-rate 1e-2 --optimizer.warmup 0"
    run += " --optimizer.rates constant --mesh.fsdp 2 --mesh.tensor 2 --zero 3"

    def command(folder: str, steps: int, name: str = "high") -> list[str]:
        prompts = tmp_path / f"{folder}.jsonl"
        prompts.write_text(
            "\n".join(json.dumps({"prompt": letter, "log": f"{tmp_path / folder}.log"}) for letter in "abc")
        )
        words = ["--model", tmp_path / "M", "--data", prompts, "--held-out", prompts, "--steps", steps, *run.split()]
        return [*map(str, [*words, "--reward", f"{tmp_path}/rewards.py:{name}", "--run-dir", tmp_path / folder])]

    devices, where = ["--simulate", "2"], coordinator()
    commands = [command("broken", 4, "broken"), command("two", 4), command("two", 8)]
    code, line = SEVERAL.replace("pretrain", "reinforce"), json.dumps([[*words, *devices] for words in commands])
    processes = [start_code(code, where, number, line) for number in range(2)]
    first, second = outputs(processes)
    assert "it raised KeyError: 'answer'; correct the function" in first and not (tmp_path / "broken").exists()
    assert "process 0 failed, so this" in second and second.count("error: ") == 1
    assert "goes on at step 4" in first and "step 8/8" in first and "step 8/8" not in second
    assert {*(tmp_path / "two.log").read_text().split()} == {str(processes[0].pid)}

    done = run_here("reinforce.py", *command("one", 8), "--simulate", 4)
    assert done.returncode == 0, done.stderr
    names = "reward", "loss", "kl", "entropy", "completion_tokens", "validation_reward"
    one, two = (
        [[row.get(name, 0.0) for name in names] for row in rows(tmp_path / name, "step")] for name in ("one", "two")
    )
    assert len(one) == 11 and two == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in one]
    assert one[-1] != pytest.approx(one[0], rel=1e-2)  # the control
    samples, others = ((tmp_path / name / "samples.txt").read_text() for name in ("one", "two"))
    assert samples == others and samples.count("(reward ") == 2


@pytest.fixture
def at_kubernetes(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setitem(sys.modules, "kubernetes", None)


@pytest.mark.quick
def test_a_missing_package_for_kubernetes_is_named_once(at_kubernetes, capsys):
    connect(Machine())
    error = capsys.readouterr().err
    assert error.count("warning: ") == 1 and "pip install jax[k8s]" in error


def test_a_cluster_that_cannot_be_asked_is_none(monkeypatch, capsys):
    class Broken:
        opt_in_only_method = False

        def is_env_present(self):
            raise OSError("no service account")

    monkeypatch.setattr(ClusterEnv, "_cluster_types", [Broken()])
    connect(Machine())
    error = capsys.readouterr().err
    assert error.count("warning: ") == 1 and "OSError: no service account" in error and "--coordinator" in error


def test_a_jax_that_has_its_clusters_elsewhere_has_none(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax._src.clusters", None)
    connect(Machine())
    assert "ModuleNotFoundError" in capsys.readouterr().err
