"""Run the grid in parts: `python tests/grid.py PART ...` runs parts, `python tests/grid.py` lists their last results.

Results are stored in `.grid.json`, which is not committed.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


ROOT = Path(__file__).parents[1]
RECORD = ROOT / ".grid.json"
SOURCES = ("eqformer", "scripts", "tests", "pyproject.toml")
# The folders and files of each part. `models` and `parallel` leave out the files that other parts name.
PARTS = {
    "layers": (
        *(
            "tests/nn",
            "tests/kernels",
            "tests/data",
            "tests/generation",
            "tests/training",
            "tests/planning",
            "tests/recipes",
            "tests/program",
            "tests/systems",
            "tests/interpretability",
            "tests/text",
            "tests/evaluation",
            "tests/serving",
        ),
        *(
            "tests/test_docs.py",
            "tests/test_tutorials.py",
            "tests/test_modules_of_ones_own.py",
            "tests/test_reference.py",
            "tests/test_calls.py",
        ),
    ),
    "models": ("tests/models",),
    "layouts": ("tests/models/test_family_layouts.py",),
    "parity": ("tests/parallel/test_plan_parity.py",),
    "serving": (
        "tests/parallel/test_sharded_model.py",
        "tests/systems/test_weight_stationary.py",
        "tests/systems/test_inference_bytes.py",
    ),
    "parallel": ("tests/parallel",),
    "scripts": ("tests/scripts",),
}


def part_of(file: str) -> str | None:
    """Return the part that holds a test file; the path is relative to the project's folder."""
    fits = [(len(path), part) for part, paths in PARTS.items() for path in paths if (file + "/").startswith(path + "/")]
    return max(fits)[1] if fits else None


def selection(part: str) -> list[str]:
    """Return the arguments of pytest that select a part."""
    others = [path for name, paths in PARTS.items() if name != part for path in paths]
    inside = [other for other in others if any(other.startswith(own + "/") for own in PARTS[part])]
    # A part of a few files is divided among processes by tests, not by files.
    shared_out = ["--dist", "load"] if all(path.endswith(".py") for path in PARTS[part]) else []
    return ["-m", "grid", *shared_out, *PARTS[part], *(f"--ignore={path}" for path in inside)]


def git(*arguments: str) -> str:
    """Run git, and return what it prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def told(record: dict[str, dict], changed: Callable[[str], int]) -> list[str]:
    """Return a line for each part: its last commit and result, its times, and how many files have changed since."""
    lines = []
    for part in PARTS:
        if (last := record.get(part)) is None:
            lines.append(f"{part:<10} has not been run")
            continue
        number = changed(last["commit"])
        since = f"{number} files changed since" if number else "nothing changed since"
        took = f"{last['minutes']:.0f} min, {last['processor_minutes']:.0f} of a processor"
        lines.append(f"{part:<10} {last['commit'][:8]}  {last['result']}  {took}  {since}")
    return lines


def run(part: str) -> int:
    """Run a part, store its result, and return pytest's exit code."""
    begun, spent = time.monotonic(), _processor_seconds()
    code = subprocess.run([sys.executable, "-m", "pytest", *selection(part)], cwd=ROOT).returncode
    uncommitted = "" if not git("status", "--porcelain", *SOURCES) else " with changes"
    row = {
        "commit": git("rev-parse", "HEAD"),
        "result": ("passed" if code == 0 else "failed") + uncommitted,
        "minutes": (time.monotonic() - begun) / 60,
        "processor_minutes": (_processor_seconds() - spent) / 60,
    }
    RECORD.write_text(json.dumps(recorded() | {part: row}, indent=2) + "\n", encoding="utf-8")
    return code


def _processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


def recorded() -> dict[str, dict]:
    """Return the stored result of each part."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def main(parts: Sequence[str]) -> int:
    """Run the parts, if any are named, and print the last result of each part."""
    if unknown := [part for part in parts if part not in PARTS]:
        print(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    codes = [run(part) for part in parts]
    changed = lambda commit: len(git("diff", "--name-only", commit, "--", *SOURCES).splitlines())
    print("\n".join(told(recorded(), changed)))
    return max(codes, default=0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
