"""Compare the speed and the programs of two checkouts: `python tests/compare_trees.py BEFORE AFTER [ROUNDS]`.

Run this by hand to check a change that must not affect results, for example
`git worktree add /tmp/before COMMIT; python tests/compare_trees.py /tmp/before .`. Both checkouts run with this Python,
in processes of their own that take turns (A B A B), so that other work on the machine slows down both equally. The
table has medians of wall time and of processor time; a ratio is the median over turns of after divided by before.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


Times = dict[str, list[float]]
START = time.perf_counter(), time.process_time()


def import_package() -> None:
    """Import the package alone."""
    import eqformer  # noqa: F401


def import_models() -> None:
    """Import the room of published models, with everything that it needs."""
    import eqformer.models  # noqa: F401


def first_step() -> None:
    """Import, build a small Llama, and trace, compile and run a training step."""
    from benchmarks import _ours, _rows

    config = _rows._llama("llama-byte-1m")
    _ours.train_step(config, _ours.random_batch(config.vocab, 8, 64))()


def first_mesh_step() -> None:
    """Do the same as `first_step` over 8 simulated devices."""
    _mesh_step()()


def _mesh_step() -> Any:
    import eqformer

    eqformer.prepare(devices=8)
    from benchmarks import _ours, _rows

    from eqformer.parallel import make_mesh, Plan

    plan = Plan(make_mesh(fsdp=2, context=2, tensor=2))
    return _ours.OverMesh(_rows._llama("llama-byte-1m"), plan, 8, 64)


STARTS: dict[str, Callable[[], None]] = {
    "import eqformer": import_package,
    "import eqformer.models": import_models,
    "first training step": first_step,
    "first training step, 8 simulated devices": first_mesh_step,
}


def describe_programs() -> dict[str, float]:
    """Return the costs of compiled training steps on one device and on a mesh, and the loss after two steps."""
    mesh = _mesh_step()
    from benchmarks import _ours, _rows

    config = _rows._llama("llama-byte-8m")
    batch = _ours.random_batch(config.vocab, 8, 256)
    step, state = _ours.step_and_state(config)
    figures = {"one device": step.lower(state, batch).compile(), "8 devices": mesh.step.program}
    costs = {f"{name}, {key}": value for name, program in figures.items() for key, value in _costs(program).items()}
    run = _ours.train_step(config, batch)
    run()
    mesh()
    mesh()
    return costs | {"one device, loss of step 2": run(), "8 devices, loss of step 2": mesh.loss}


def _costs(program: Any) -> dict[str, float]:
    memory, costs = program.memory_analysis(), program.cost_analysis()
    return {
        "flops": costs["flops"],
        "bytes accessed": costs["bytes accessed"],
        "argument bytes": memory.argument_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "peak bytes": memory.peak_memory_in_bytes,
    }


def serve_rows() -> None:
    """Build the contenders of two rows of `scripts/benchmark.py`, and run the contender that each input line names."""
    from benchmarks import _rows

    calls: dict[str, Callable[[], Any]] = {}

    def collect(contenders: dict[str, Callable[[], Any]], rounds: int) -> Times:
        for name, call in contenders.items():
            call()
            calls[f"{len(calls)} {name}"] = call
        return {name: [1.0] for name in contenders}

    _rows.seconds_in_turn = collect
    for row in (_rows.train, _rows.decode):
        list(row(1))
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        start = time.perf_counter(), time.process_time()
        calls[line.strip()]()
        print(json.dumps(_since(start)), flush=True)


def _since(start: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - start[0], time.process_time() - start[1]


def start_child(tree: Path, task: str) -> subprocess.Popen[str]:
    """Start a process that imports the checkout `tree` and its scripts, and does one task."""
    paths = os.pathsep.join([str(tree), str(tree / "scripts")])
    env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), "--task", task]
    return subprocess.Popen(command, cwd=tree, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run_child(tree: Path, task: str) -> Any:
    """Run a task, and return the value in the last line that it prints."""
    output, _ = start_child(tree, task).communicate()
    return json.loads(output.splitlines()[-1])


def print_ratios(name: str, pairs: list[tuple[Any, Any]]) -> None:
    """Print a row of the table from pairs of times, before and after; each is a wall time and a processor time."""
    cells = []
    for kind in (0, 1):
        before, after = ([pair[side][kind] for pair in pairs] for side in (0, 1))
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        cells += [f"{statistics.median(before):.3f} s", f"{statistics.median(after):.3f} s"]
        cells += [f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def compare(trees: list[Path], rounds: int) -> None:
    """Print the tables."""
    for task in STARTS:
        print_ratios(task, [(run_child(trees[0], task), run_child(trees[1], task)) for _ in range(rounds)])
    children = [start_child(tree, "rows") for tree in trees]
    names = [json.loads(_answer(child)) for child in children]
    assert names[0] == names[1], names
    for name in names[0]:
        pairs = [[_ask(child, name) for child in children] for _ in range(rounds)]
        print_ratios(name, [(before, after) for before, after in pairs])
    for child in children:
        child.communicate()
    before, after = (run_child(tree, "programs") for tree in trees)
    for name, value in before.items():
        print(f"| {name} | {value!r} | {after[name]!r} | {'equal' if value == after[name] else 'DIFFERENT'} |")


def _ask(child: subprocess.Popen[str], name: str) -> Any:
    assert child.stdin is not None
    child.stdin.write(name + "\n")
    child.stdin.flush()
    return json.loads(_answer(child))


def _answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def main(arguments: list[str]) -> None:
    """Do one task in this process, or compare two checkouts."""
    if arguments[0] != "--task":
        before, after, *rounds = arguments
        compare([Path(before).resolve(), Path(after).resolve()], int(*rounds) if rounds else 5)
    elif arguments[1] == "rows":
        serve_rows()
    elif arguments[1] == "programs":
        print(json.dumps(describe_programs()))
    else:
        STARTS[arguments[1]]()
        print(json.dumps(_since(START)))


if __name__ == "__main__":
    main(sys.argv[1:])
