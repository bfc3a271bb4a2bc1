"""Evaluation of a run's model on texts and tasks during its training."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
from jaxtyping import PyTree

from .. import data, models, nn, parallel, training
from ..evaluation import Evaluator
from ..parallel import on_first_process
from ..text import make_llm, read_chat_template
from ._recipe import Recipe
from ._report import print_warnings
from ._run_directory import RunDirectory
from ._texts import published_files, run_mask_id, Tokenizer


def open_evaluator(recipe: Recipe) -> Evaluator | None:
    """Load the texts and tasks on which the recipe's run is evaluated; return None if there are none.

    Raises a `ValueError` that names the flags, and an `ImportError` for tasks if lm-evaluation-harness is missing.
    """
    if recipe.evaluate_every < 0:
        raise ValueError(
            f"--evaluate-every {recipe.evaluate_every}: give the steps between evaluations, or 0 for none at all."
        )
    if recipe.evaluate_limit is not None and recipe.evaluate_limit < 1:
        raise ValueError(f"--evaluate-limit {recipe.evaluate_limit}: give a number of documents, at least 1.")
    has_subject = bool(recipe.evaluate_text or recipe.evaluate_tasks)
    if has_subject != bool(recipe.evaluate_every):
        raise ValueError(
            f"--evaluate-every {recipe.evaluate_every}: an evaluation needs an interval, and texts or tasks; give "
            "--evaluate-every N with --evaluate-text FILE ... or --evaluate-tasks NAME ..., or leave all three out."
        )
    if not has_subject:
        return None
    texts, tasks = _read_texts(recipe), recipe.evaluate_tasks
    try:
        return Evaluator(
            texts=texts,
            tasks=tasks,
            limit=recipe.evaluate_limit,
            apply_chat_template=recipe.evaluate_chat,
            include_path=recipe.evaluate_include_path,
        )
    except ValueError as error:
        raise ValueError(f"--evaluate-tasks {' '.join(tasks)}: {error}") from error


def _read_texts(recipe: Recipe) -> dict[str, list[str]]:
    """Return the texts of each path in --evaluate-text, by the path's last part.

    If several paths have the same last part, their names are the whole paths. Texts are read once, so that all
    evaluations of a process score the same texts.
    """
    texts: dict[str, list[str]] = {}
    last_parts = [Path(path).name for path in recipe.evaluate_text]
    for path, last_part in zip(recipe.evaluate_text, last_parts):
        try:
            with print_warnings():
                documents = data.files(path, field=recipe.text.field, piece=sys.maxsize)
                name = last_part if last_parts.count(last_part) == 1 else path
                texts[name] = [document.text for document in documents]
        except ValueError as error:
            raise ValueError(f"--evaluate-text {path}: {error}") from error
        if not any(len(text) > 1 for text in texts[name]):
            raise ValueError(
                f"--evaluate-text {path}: there is no text to score; give a text of two characters or more."
            )
    return texts


def make_scores(
    recipe: Recipe,
    evaluator: Evaluator,
    tokenizer: Tokenizer,
    directory: RunDirectory,
    states: training.PlannedState,
    shapes: nn.LanguageModel,
) -> Callable[[PyTree], dict[str, float]]:
    """Return the function that scores the model of the run's state, under the plan of the run.

    In a run of several processes, the first process scores a copy of the model on one device, and the other processes
    return an empty dict. Raises a `ValueError` for a plan under which a model of these `shapes` cannot be decoded, and
    for a model without a chat template if the tasks use the template.
    """
    plan, is_alone = states.plan, jax.process_count() == 1
    if is_alone and plan.mesh.size > 1:
        parallel.ShardedModel(shapes, plan)
    published = published_files(recipe, directory)
    folder = directory.published if published is None else models.companion_folder(published)
    if recipe.evaluate_chat and read_chat_template(folder) is None:
        raise ValueError(
            "--evaluate-chat: the model has no chat template; leave --evaluate-chat out, or give --model of a chat "
            "model."
        )

    mask_id = run_mask_id(recipe, tokenizer, directory)

    def score_model(model: PyTree) -> dict[str, float]:
        llm = make_llm(model, tokenizer, folder, recipe.seq, special_tokens=published is not None, mask_id=mask_id)
        return evaluator(llm)

    def score_state(model: PyTree) -> dict[str, float]:
        if not is_alone:
            copy = states.copy_model_to_one_device(model)
            return on_first_process(lambda: score_model(nn.without_fp8(copy))) or {}
        model = nn.without_fp8(plan.unshard(model))
        return score_model(parallel.ShardedModel(model, plan) if plan.mesh.size > 1 else model)

    return score_state


def evaluation_line(row: dict[str, int | float]) -> str:
    """Return the scores of a step in one line: bits per byte of texts, and accuracies of tasks."""
    scores = []
    for name, value in row.items():
        subject, _, metric = name.removeprefix("evaluation/").rpartition("/")
        if metric == "bits_per_byte":
            scores.append(f"{subject} {value:.4f} bits a byte")
        elif metric.split(" (")[0] in ("acc", "exact_match", "centered_accuracy"):
            scores.append(f"{subject} {metric.replace('_', ' ')} {value:.1%}")
    return f"evaluation after {row['step']} steps: {', '.join(scores) or 'see metrics.jsonl'}"
