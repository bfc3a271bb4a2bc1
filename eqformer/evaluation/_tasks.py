"""Tasks of lm-evaluation-harness, which run in this process: once, or again and again during training."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .._failures import load_extra
from .._shapes import as_tuple
from ..text import LLM
from ._texts import evaluate_texts


DEFAULT_LENGTH = 2048
ACCURACIES = "acc", "exact_match"
"""Metrics that count as an accuracy (a share of right answers); the preferred metric is first."""


class TaskAverage(NamedTuple):
    """Means over tasks, each of which counts once."""

    accuracy: float
    """The mean accuracy."""
    centered_accuracy: float
    """The mean of `(accuracy - chance) / (1 - chance)`: 0 if a model guesses, and 1 if it is always right."""
    chances: Mapping[str, float]
    """The accuracy of guessing for each averaged task: for multiple choice the mean of `1 / choices` over the
    documents, and 0 for all other tasks. Tasks without an accuracy, such as perplexities, are left out."""


class TaskResults(NamedTuple):
    """Results of tasks, as lm-evaluation-harness computes them."""

    metrics: Mapping[str, Mapping[str, float]]
    """The metrics of each task by name, such as `{"arc_easy": {"acc": 0.61, "acc_stderr": 0.01}}`. A metric that the
    harness computes after a filter is named `metric (filter)`."""
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    """Per task, the harness' record of each document: requests, answers and scores."""
    report: Mapping[str, Any]
    """Everything that the harness returned, with the tasks' configurations and versions."""

    @property
    def average(self) -> TaskAverage | None:
        """The means over the named tasks and groups that have an accuracy; None if no task has one.

        The centered mean is computed in the same way as the CORE metric of DataComp-LM (arXiv:2406.11794).
        """
        inner_names = {name for names in self._subtasks.values() for name in names}
        outer_names = [name for name in self.metrics if name not in inner_names]
        accuracies: dict[str, float] = {}
        for name in outer_names:
            accuracies |= self._accuracies(name)
        if not accuracies:
            return None
        chances = {name: self._chance(name) for name in accuracies}
        centered = [(value - chances[name]) / (1 - chances[name]) for name, value in accuracies.items()]
        return TaskAverage(sum(accuracies.values()) / len(accuracies), sum(centered) / len(centered), chances)

    @property
    def _subtasks(self) -> Mapping[str, Sequence[str]]:
        """The tasks and groups in each group."""
        return self.report.get("group_subtasks", {})

    def _accuracies(self, name: str) -> dict[str, float]:
        """Return the accuracy of a task or a group by name; for a group without one, its members' accuracies."""
        metrics = self.metrics.get(name, {})
        for accuracy in ACCURACIES:
            for metric, value in metrics.items():
                if metric.split(" (")[0] == accuracy:
                    return {name: value}
        accuracies: dict[str, float] = {}
        for subtask in self._subtasks.get(name, ()):
            accuracies |= self._accuracies(subtask)
        return accuracies

    def _chance(self, name: str) -> float:
        """Return the accuracy of guessing the answers of a task or a group; all documents of a group count equally."""
        chances = [chance for task in self._list_tasks(name) for chance in self._document_chances(task)]
        return sum(chances) / len(chances) if chances else 0.0

    def _list_tasks(self, name: str) -> list[str]:
        """Return the tasks of a group; for a task, the task itself."""
        if name not in self._subtasks:
            return [name]
        return [task for subtask in self._subtasks[name] for task in self._list_tasks(subtask)]

    def _document_chances(self, task: str) -> list[float]:
        config, samples = self.report["configs"][task], self.samples.get(task, ())
        if config["output_type"] != "multiple_choice":
            return [0.0] * len(samples)
        # For mutual information the harness scores each answer a second time, without the question.
        asks_twice = any(metric.get("metric") == "acc_mutual_info" for metric in config.get("metric_list") or ())
        return [(2 if asks_twice else 1) / len(sample["resps"]) for sample in samples]


def harness_model(
    llm: LLM,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Any:
    """Return the model as an `LM` of lm-evaluation-harness, for `lm_eval.simple_evaluate(model=...)`.

    Requests of like lengths are read together, and a context that several answers share is read once. A model of block
    diffusion gives lower bounds of log-probabilities (`generation.score_blocks`), and writes texts block by block.

    Args:
        llm: The model with its tokenizer; on any mesh.
        batch_size: Rows that are read or continued together.
        max_length: Tokens that the model reads at most; longer contexts lose their beginning. None: the length that the
            model was published for, or 2,048.
        progress: A function that is called with the name of the work, the number of finished requests, and the number
            of all requests.

    **Raises:** `ImportError` if `lm_eval` is not installed.
    """
    load_extra("lm_eval", extra="eval", call="harness_model(llm)")
    from ._harness import HarnessModel

    limits = [limit for limit in (max_length, llm.model.max_seq) if limit is not None]
    length = min(limits) if limits else llm.max_length or DEFAULT_LENGTH
    return HarnessModel(llm, batch_size=batch_size, max_length=length, progress=progress)


def load_tasks(tasks: str | Sequence[Any], *, include_path: str | Path | None = None) -> list[Any]:
    """Load tasks of lm-evaluation-harness with their data; `evaluate_tasks` can run loaded tasks many times.

    Args:
        tasks: Names of tasks or groups, or configurations of tasks as mappings. Loaded tasks are returned unchanged.
        include_path: A folder with configurations of further tasks.

    **Raises:** `ImportError` if `lm_eval` is not installed; `ValueError` for a task that the harness does not know, and
    for a task that it cannot load, for example because its data cannot be downloaded.
    """
    tasks = list(as_tuple(tasks))
    names = [task for task in tasks if isinstance(task, str)]
    configurations = [task for task in tasks if isinstance(task, Mapping)]
    if not names and not configurations:
        return tasks
    # The index of all tasks takes seconds; a configuration that describes its task in full needs no index.
    needs_index = bool(names) or any("group" in configuration for configuration in configurations)
    folder = None if include_path is None else str(include_path)
    manager = _make_task_manager(include_path=folder, include_defaults=needs_index)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=5)
        raise ValueError(
            f"load_tasks({tasks}): lm-evaluation-harness has no task {unknown[0]!r}; "
            f"{'near names are ' + ', '.join(near) if near else 'see `lm-eval ls tasks`'}."
        )
    return [loaded for task in tasks for loaded in _load_task(manager, task)]


def _make_task_manager(**options: Any) -> Any:
    load_extra("lm_eval", extra="eval", call="load_tasks(tasks)")
    return load_extra("lm_eval.tasks", extra="eval", call="load_tasks(tasks)").TaskManager(**options)


def _load_task(manager: Any, task: Any) -> list[Any]:
    """Return the loaded task or group that a name stands for; for a tag, each of its tasks."""
    try:
        loaded = manager.load([dict(task) if isinstance(task, Mapping) else task])
    except Exception as error:  # Configurations and downloads fail with errors of any class.
        name = task.get("task") if isinstance(task, Mapping) else task
        raise ValueError(
            f"load_tasks(...): lm-evaluation-harness cannot load the task {name!r} ({type(error).__name__}: {error}); "
            "correct its configuration, or see that its data can be downloaded."
        ) from error
    inner_names = {name for names in loaded["group_map"].values() for name in names}
    items = {**loaded["groups"], **loaded["tasks"]}
    return [item for name, item in items.items() if name not in inner_names]


def evaluate_tasks(
    llm: LLM,
    tasks: str | Sequence[Any],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
    batch_size: int = 8,
    max_length: int | None = None,
    include_path: str | Path | None = None,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> TaskResults:
    """Run tasks of lm-evaluation-harness on a model in this process.

    Args:
        llm: The model with its tokenizer; on any mesh.
        tasks: Names of tasks or groups, configurations of tasks as mappings, or tasks that `load_tasks` returned.
        num_fewshot: Examples that are shown before each question; None: the task's own number.
        limit: Documents of each task; None: all.
        apply_chat_template: Whether questions are asked by the model's chat template.
        batch_size: As in `harness_model`.
        max_length: As in `harness_model`.
        include_path: A folder with configurations of further tasks.
        progress: As in `harness_model`.

    **Raises:** As `load_tasks`.
    """
    model = harness_model(llm, batch_size=batch_size, max_length=max_length, progress=progress)
    loaded_tasks = load_tasks(tasks, include_path=include_path)
    report = load_extra("lm_eval", extra="eval", call="evaluate_tasks(llm, tasks)").simple_evaluate(
        model=model,
        tasks=loaded_tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        task_manager=_make_task_manager(include_defaults=False),
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


_NO_TEXTS: Mapping[str, Sequence[str]] = MappingProxyType({})


class Evaluator:
    """Evaluator on texts and tasks, which it loads once; each call scores a model and returns a row of numbers.

        evaluator = evaluation.Evaluator(texts={"book": [text]}, tasks=["arc_easy"], limit=100)
        row = evaluator(llm)  # {"evaluation/book/bits_per_byte": 1.2, "evaluation/arc_easy/acc": 0.6, ...}

    The callback `training.Evaluations` writes these rows during training.
    """

    def __init__(
        self,
        *,
        texts: Mapping[str, Sequence[str]] = _NO_TEXTS,
        tasks: str | Sequence[Any] = (),
        limit: int | None = None,
        apply_chat_template: bool = False,
        include_path: str | Path | None = None,
        batch_size: int = 8,
    ):
        """Load the tasks.

        Args:
            texts: Lists of texts by name, which `evaluate_texts` scores.
            tasks: Tasks as `load_tasks` takes them.
            limit: Documents of each task; None: all.
            apply_chat_template: Whether tasks use the model's chat template.
            include_path: A folder with configurations of further tasks.
            batch_size: Rows that the model reads at once.

        **Raises:** `ValueError` if there are neither texts nor tasks, or if a name has no text; and the errors of
        `load_tasks`.
        """
        if empty := [name for name, documents in texts.items() if not any(documents)]:
            raise ValueError(f"Evaluator(texts=...): {empty[0]!r} has no text; leave it out, or give it a text.")
        self.texts = {name: list(documents) for name, documents in texts.items()}
        self.tasks = load_tasks(tasks, include_path=include_path)
        if not self.texts and not self.tasks:
            raise ValueError("Evaluator(): there is nothing to score; give texts or tasks.")
        self.limit, self.apply_chat_template, self.batch_size = limit, apply_chat_template, batch_size

    def __call__(self, llm: LLM) -> dict[str, float]:
        """Return the scores of a model by names such as `evaluation/book/bits_per_byte`.

        Each list of texts has `bits_per_byte`, `perplexity` and `accuracy`, and each task has its metrics. If several
        tasks have an accuracy, `evaluation/average/accuracy` and `evaluation/average/centered_accuracy` are the means
        of `TaskResults.average`.
        """
        row: dict[str, float] = {}
        for name, texts in self.texts.items():
            scores = evaluate_texts(llm, texts, batch_size=self.batch_size)
            for metric in ("bits_per_byte", "perplexity", "accuracy"):
                row[f"evaluation/{name}/{metric}"] = getattr(scores, metric)
        if not self.tasks:
            return row
        results = evaluate_tasks(
            llm,
            self.tasks,
            limit=self.limit,
            apply_chat_template=self.apply_chat_template,
            batch_size=self.batch_size,
        )
        for name, metrics in results.metrics.items():
            row |= {f"evaluation/{name}/{metric}": value for metric, value in metrics.items()}
        average = results.average
        if average is not None and len(average.chances) > 1:
            row["evaluation/average/accuracy"] = average.accuracy
            row["evaluation/average/centered_accuracy"] = average.centered_accuracy
        return row
