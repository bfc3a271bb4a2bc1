"""Evaluation of language models: perplexity of texts, and tasks of lm-evaluation-harness."""

from ._tasks import (
    evaluate_tasks as evaluate_tasks,
    Evaluator as Evaluator,
    harness_model as harness_model,
    load_tasks as load_tasks,
    TaskAverage as TaskAverage,
    TaskResults as TaskResults,
)
from ._texts import evaluate_texts as evaluate_texts, TextScores as TextScores
