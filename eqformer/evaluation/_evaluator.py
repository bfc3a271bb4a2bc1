"""Texts and tasks on which a model is scored several times, as during its training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..text import LLM
from ._tasks import evaluate_tasks, load_tasks
from ._texts import evaluate_texts


_NO_TEXTS: Mapping[str, Sequence[str]] = MappingProxyType({})


class Evaluator:
    """Texts and tasks, loaded once, on which calls score a model, as one row of numbers.

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
            texts: Lists of texts by name, of which `evaluate_texts` scores each token once.
            tasks: Tasks as `load_tasks` takes them.
            limit: Documents of each task; None: all.
            apply_chat_template: Whether tasks use the model's chat template.
            include_path: A folder with configurations of further tasks.
            batch_size: Rows that the model reads at once.

        **Raises:** `ValueError` for neither texts nor tasks, and for a name without any text; and what `load_tasks`
        raises.
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

        Each text has `bits_per_byte`, `perplexity` and `accuracy`, and each task has its metrics. Where several tasks
        have an accuracy, `evaluation/average/accuracy` and `evaluation/average/centered_accuracy` are the means of
        `TaskResults.average`.
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
