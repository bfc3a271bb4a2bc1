"""Scripts end with one message, or silently if their output is no longer read."""

import os
import subprocess
import time

import jax
import pytest
from script_helpers import command, PLAIN, SCRIPTS
from support.ending import one_message

from eqformer.recipes import _report


# How each script writes: by print, by rich, into a buffer that is written out at the end, while it ends for help.
WRITES = {
    "print": "print('text', flush=True)",
    "rich": "from eqformer import recipes; recipes.Screen().note('text')",
    "buffer": "print('text')",
    "help": "print('text'); raise SystemExit(0)",
    "many": "[print('text' * 99) for _ in range(999)]",
}
GRID = pytest.mark.grid  # a process each
CODE = "import sys; sys.path.insert(0, {!r})\nfrom support import ending\n"
CODE += "with ending.one_message():\n    {}"


def unread(arguments):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, env=PLAIN, timeout=300)
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize("writes", [name if name == "buffer" else pytest.param(name, marks=GRID) for name in WRITES])
def test_a_reader_that_has_seen_enough_ends_a_script_quietly(writes):
    code = CODE.format(str(SCRIPTS), WRITES[writes])
    for buffered in [[], ["-u"]] if writes == "print" else [[]]:  # and where nothing is buffered
        assert unread([command("")[0], *buffered, "-c", code]) == (141, b"")


@GRID
def test_so_does_a_whole_script():
    assert unread(command("plan.py")) == (141, b"")


@pytest.mark.quick
def test_every_script_ends_as_the_others():
    scripts = [path for path in SCRIPTS.glob("[a-z]*.py")]
    assert len(scripts) >= 6
    for script in scripts:
        text = script.read_text()
        assert "\nmain = entry(Command, " in text and "except (" not in text, script


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ConnectionRefusedError(111, "refused")])
def test_a_connection_that_ended_is_named_and_is_no_process_of_the_run(error, capfd):
    with pytest.raises(SystemExit) as end, one_message():
        raise error
    errors = capfd.readouterr().err
    assert end.value.code == 2 and errors.startswith("error: ") and error.strerror in errors and "process" not in errors


def test_an_interrupt_ends_a_script_with_one_line(capfd):
    with pytest.raises(SystemExit) as end, one_message():
        raise KeyboardInterrupt
    assert end.value.code == 130 and capfd.readouterr().err == "stopped by Ctrl-C\n"


# Before the script's own work, in it, in what it ends with, twice, and after it.
INTERRUPTS = {
    "stop()": 1,
    "with stopping.interruptible(): stop()": 1,
    "with stopping.interruptible():\n  try: stop()\n  finally: stop()": 1,
    "try:\n  with stopping.interruptible(): stop()\nfinally: stop()": 1,
    "with stopping.interruptible(): pass\nstop()": 1,
    "with stopping.interruptible(): pass": 0,  # the control
}


def test_an_interrupt_at_any_time_is_one_line_and_no_traceback():
    start = f"import os, signal, sys; sys.path.insert(0, {str(SCRIPTS)!r}); from support import stopping\n"
    start += "stopping.end_at_interrupt()\nstop = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
    for code, lines in INTERRUPTS.items():
        done = subprocess.run([command("")[0], "-c", start + code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (130 * lines, "stopped by Ctrl-C\n" * lines), code


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys):
    """With the time that is left and, of one call that takes long, the time that it has taken."""
    monkeypatch.setattr(_report, "SECONDS_A_LINE", 0.0)
    with monkeypatch.context() as clock, _report.Screen(errors=True).counting() as show:
        for seconds, done in ((0, 0), (100, 5), (103, 6)):  # compiling, and what an earlier command has done
            clock.setattr(time, "monotonic", lambda seconds=seconds: 1e6 + seconds)
            show("rows", done, 8)
    monkeypatch.setattr(_report, "SECONDS_A_LINE", 0.01)
    with _report.Screen(errors=True).working("compiling"):
        time.sleep(0.05)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["rows: 0 of 8", "rows: 5 of 8", "rows: 6 of 8, ETA 0:00:06"]
    assert lines[3:5] == ["compiling", "compiling: 0:00:00 so far"]
    monkeypatch.setattr(_report, "SECONDS_A_LINE", 60.0)  # the control
    with _report.Screen(errors=True).counting() as show:
        show("plans", 1, 4)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "words,index,ends", [("Gloo: peer closed", 1, [2]), ("Gloo: peer", 0, [3, 2]), ("full", 1, [])]
)
def test_a_process_whose_peer_is_lost_ends_after_its_message(words, index, ends, monkeypatch, capfd):
    seen = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr("time.sleep", seen.append)
    monkeypatch.setattr(os, "_exit", seen.append)
    with pytest.raises(SystemExit) as end, one_message():
        raise jax.errors.JaxRuntimeError(words)
    assert end.value.code == 2 and seen == ends and capfd.readouterr().err.startswith(f"error: {words}")
