"""Runs that evaluate their model on texts and tasks: scores, resume, pictures, and errors."""

import importlib.util
import json
import sys

import pytest
from script_helpers import rows, run_here, TINY
from text_cases import published_folder, TEMPLATE

import eqformer
from eqformer import evaluation


HARNESS = importlib.util.find_spec("lm_eval") is not None
FLAGS = "--sample-every 0 --validate-every 100 --checkpoint-every 2 --optimizer.rates constant --optimizer.warmup 1"
RUN = [*TINY[TINY.index("--seq") :], *FLAGS.split()]
BOOK = "evaluation/book.txt/bits_per_byte"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published chat model, a text to learn and two to evaluate on."""
    place = tmp_path_factory.mktemp("evaluated")
    published_folder(place / "model", chat_template__jinja=TEMPLATE)
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (place / "book.txt").write_text("the quick brown fox " * 5)
    (place / "other.txt").write_text("0123456789 " * 9)
    return place


def flags_of(folder, run_dir) -> list:
    return [
        *("--model", folder / "model", "--data", folder / "text.txt", *RUN, "--run-dir", run_dir),
        *("--evaluate-every", 2, "--evaluate-text", folder / "book.txt", folder / "other.txt"),
    ]


@pytest.mark.grid
@pytest.mark.parametrize("mesh", ["--simulate 1", "--simulate 2 --mesh.fsdp 2 --zero 3"])
def test_a_run_is_evaluated_and_goes_on_without_evaluating_a_step_twice(folder, tmp_path, mesh):
    flags = flags_of(folder, tmp_path / "run")
    done = run_here("pretrain.py", *flags, "--simulate", 1, "--steps", 3)
    assert done.returncode == 0 and "evaluation after 0 steps: book.txt" in done.stdout, done.stderr
    again = run_here("pretrain.py", *flags, *mesh.split(), "--steps", 5)
    assert again.returncode == 0, again.stderr
    scores = rows(tmp_path / "run", BOOK)
    assert [row["step"] for row in scores] == [0, 2, 3, 4, 5]
    assert scores[-1][BOOK] < scores[0][BOOK] and (tmp_path / "run" / "evaluations.png").exists()
    # Each score is that of the library on the model as it was published, or as the run has saved it, on any mesh.
    texts = [(folder / "book.txt").read_text()]
    for row, source in (scores[0], folder / "model"), (scores[-1], tmp_path / "run"):
        expected = evaluation.evaluate_texts(eqformer.load(source), texts, window=32)
        assert row[BOOK] == pytest.approx(expected.bits_per_byte, rel=1e-5)
        assert row["evaluation/book.txt/accuracy"] == expected.accuracy
    assert scores[0]["evaluation/other.txt/bits_per_byte"] != pytest.approx(scores[0][BOOK], rel=1e-2)  # the control


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh", ["--mesh.pipe 2 --microbatches 2 --mesh.tensor 2", "--mesh.context 2 --mesh.fsdp 2 --zero 1"]
)
def test_scores_are_those_of_one_device(folder, tmp_path, mesh):
    flags = [*flags_of(folder, tmp_path / "run"), "--steps", 2]
    model = ["--model.layers", 2] if "pipe" in mesh else []
    if model:  # The published model has one layer, and a pipeline needs two.
        flags = ["--recipe", "llama-byte-1m", *TINY[:6], "--model.kv-heads", 2, *flags[2:]]
    done = run_here("pretrain.py", *flags, "--simulate", 4, *mesh.split())
    assert done.returncode == 0, done.stderr
    row = rows(tmp_path / "run", BOOK)[-1]
    texts = [(folder / "book.txt").read_text()]
    expected = evaluation.evaluate_texts(eqformer.load(tmp_path / "run"), texts, window=32)
    assert row[BOOK] == pytest.approx(expected.bits_per_byte, rel=1e-5)


def test_tasks_without_the_harness_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    run = ["--model", folder / "model", "--data", folder / "text.txt", *RUN, "--run-dir", tmp_path / "run"]
    done = run_here("pretrain.py", *run, "--simulate", 1, "--evaluate-every", 2, "--evaluate-tasks", "arc_easy")
    assert done.returncode == 2 and 'pip install "eqformer[eval]"' in done.stderr
    assert not (tmp_path / "run").exists()


def write_tasks(folder):
    """Two tasks of multiple choice, as files of the harness."""
    folder.mkdir()
    documents = [{"question": f"{n} and", "choices": ["a fox", "a dog"], "label": n % 2} for n in range(6)]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, documents)))
    for name in ("animals", "beasts"):
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / 'rows.json'}\n"
            "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
            "doc_to_choice: '{{choices}}'\ndoc_to_target: label\nmetric_list:\n  - metric: acc\n"
        )
    return folder


@pytest.mark.hf
@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
@pytest.mark.filterwarnings("default")
def test_a_run_is_evaluated_on_tasks(folder, tmp_path):
    include = write_tasks(tmp_path / "tasks")
    run = ["--model", folder / "model", "--data", folder / "text.txt", *RUN, "--run-dir", tmp_path / "run"]
    run += ["--simulate", 1, "--steps", 2, "--evaluate-every", 2, "--evaluate-include-path", include]
    done = run_here("pretrain.py", *run, "--evaluate-tasks", "animals", "beasts", "--evaluate-limit", 4)
    assert done.returncode == 0, done.stderr
    scores = rows(tmp_path / "run", "evaluation/animals/acc")
    assert [row["step"] for row in scores] == [0, 2]
    average = evaluation.evaluate_tasks(
        eqformer.load(tmp_path / "run"), ["animals", "beasts"], limit=4, include_path=include
    ).average
    assert average is not None and average.chances == {"animals": 0.5, "beasts": 0.5}
    assert scores[-1]["evaluation/average/centered_accuracy"] == pytest.approx(average.centered_accuracy)
    printed = run_here(
        "evaluate.py", "--run-dir", tmp_path / "run", "--tasks", "animals", "beasts", "--include-path", include
    )
    assert "average" in printed.stdout and "centered_accuracy" in printed.stdout, printed.stderr
    for script, flag in ("pretrain.py", "--evaluate-tasks"), ("evaluate.py", "--tasks"):
        command = [*run[:-4], "--evaluate-every", 2] if script == "pretrain.py" else ["--model", folder / "model"]
        refused = run_here(script, *command, flag, "arc_eazy")
        assert refused.returncode == 2 and f"error: {flag} arc_eazy: " in refused.stderr
        assert "has no task 'arc_eazy'; near names are arc_easy" in refused.stderr
