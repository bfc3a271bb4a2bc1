"""Two real processes train one model: they stop together, save together, and go on."""

import re
import signal
import socket

import pretrain
import pytest
from script_helpers import LLAMA, losses, start, TINY, wait_until, write_corpus

from eqformer.training import Checkpointer


# A constant rate, so that where the run ends does not matter to its beginning.
RUN = [*TINY, *LLAMA, "--batch", "8", "--optimizer.schedule", "constant", "--checkpoint-every", "100000"]
RUN += ["--validate-every", "100000", "--sample-every", "100000"]
MESH = "--mesh.fsdp 2 --mesh.replica 2 --mesh.tensor 2 --zero 3 --simulate 4".split()


def both(*arguments):
    """Two processes of four simulated devices each, begun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet = ["--coordinator", f"localhost:{port}", "--processes", 2, "--process-id"]
    return [start("pretrain.py", *arguments, *meet, number) for number in (0, 1)]


def outputs(processes):
    """What they have printed, once they have ended well; lines of the library that connects them left out."""
    texts = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    return ["".join(re.findall(r"^(?!\[Gloo\]).*\n", text, re.MULTILINE)) for text in texts]


@pytest.mark.grid
def test_two_processes_stop_together_and_go_on_as_one_process_would(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    run = ["--data", write_corpus(tmp_path / "corpus"), *RUN]
    processes = both("--run-dir", two, *run, *MESH, "--steps", 100_000)
    wait_until(two, 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    first, second = outputs(processes)
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
def test_two_processes_refuse_together(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    processes = both("--run-dir", tmp_path / "other", *RUN, *MESH)
    texts = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "holds other things than a run" in texts[0] and "process 0 could not go on" in texts[1]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]
