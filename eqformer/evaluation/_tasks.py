"""Tasks of lm-evaluation-harness, run in process."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._failures import load_extra
from ..text import LLM


DEFAULT_LENGTH = 2048


class TaskResults(NamedTuple):
    """Results of tasks, as lm-evaluation-harness computes them."""

    metrics: Mapping[str, Mapping[str, float]]
    """The metrics of each task by name, such as `{"arc_easy": {"acc": 0.61, "acc_stderr": 0.01}}`. A metric of a filter
    other than none is named `metric (filter)`."""
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    """Per task, the harness' record of each document: requests, answers and scores."""
    report: Mapping[str, Any]
    """All that the harness returned, with the tasks' configurations and versions."""


def harness_model(
    llm: LLM,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Any:
    """Return the model as an `LM` of lm-evaluation-harness, for `lm_eval.simple_evaluate(model=...)`.

    Requests of like lengths are read together, and a context that several answers share is read once.

    Args:
        llm: The model with its tokenizer; on any mesh.
        batch_size: Rows that are read or continued together.
        max_length: Tokens that the model reads at most; longer contexts lose their beginning. None: the length that the
            model was published for, or 2,048.
        progress: A function that is called with what is done, the number of requests that are done, and of all.

    **Raises:** `ImportError` if `lm_eval` is not installed.
    """
    load_extra("lm_eval", extra="eval", call="harness_model(llm)")
    from ._harness import HarnessModel

    limits = [limit for limit in (max_length, llm.model.max_seq) if limit is not None]
    length = min(limits) if limits else llm.max_length or DEFAULT_LENGTH
    return HarnessModel(llm, batch_size=batch_size, max_length=length, progress=progress)


def evaluate_tasks(
    llm: LLM,
    tasks: str | Sequence[str | Mapping[str, Any]],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
    batch_size: int = 8,
    max_length: int | None = None,
    include_path: str | None = None,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> TaskResults:
    """Run tasks of lm-evaluation-harness on a model in this process.

    Args:
        llm: The model with its tokenizer; on any mesh.
        tasks: Names of tasks or groups, or configurations of tasks as mappings.
        num_fewshot: Examples that are shown before each question; None: the task's own number.
        limit: Documents of each task; None: all.
        apply_chat_template: Whether questions are asked by the model's chat template.
        batch_size: As in `harness_model`.
        max_length: As in `harness_model`.
        include_path: A folder with configurations of further tasks.
        progress: As in `harness_model`.

    **Raises:** `ImportError` if `lm_eval` is not installed; `ValueError` for a task that the harness does not know.
    """
    model = harness_model(llm, batch_size=batch_size, max_length=max_length, progress=progress)
    lm_eval = load_extra("lm_eval", extra="eval", call="evaluate_tasks(llm, tasks)")
    tasks_module = load_extra("lm_eval.tasks", extra="eval", call="evaluate_tasks(llm, tasks)")
    manager = tasks_module.TaskManager(include_path=include_path)
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if isinstance(name, str) and name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=5)
        raise ValueError(
            f"evaluate_tasks(tasks={names}): lm-evaluation-harness has no task {unknown[0]!r}; "
            f"{'near names are ' + ', '.join(near) if near else 'see `lm-eval ls tasks`'}."
        )
    report = lm_eval.simple_evaluate(
        model=model,
        tasks=[name if isinstance(name, str) else dict(name) for name in names],
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        task_manager=manager,
        bootstrap_iters=1000,
    )
    metrics = {name: _name_metrics(values) for name, values in report["results"].items()}
    return TaskResults(metrics, report.get("samples", {}), report)


def _name_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a task by readable names: the harness calls them `metric,filter`."""
    metrics = {}
    for name, value in values.items():
        metric, _, filter_name = name.partition(",")
        if filter_name and isinstance(value, int | float):
            metrics[metric if filter_name == "none" else f"{metric} ({filter_name})"] = float(value)
    return metrics
