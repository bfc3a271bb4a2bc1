"""Check a recipe, before anything is written."""

import dataclasses
import math
import re
from typing import Any

import jax
from recipes import Recipe

from eqformer import nn, training
from support.flags import fields_of, flags_of, name_flags_in_errors
from support.published import recipe_tokenizer
from support.setup import make_loss, make_optimizer, model_shapes


_COUNTS = "--steps --seq --batch --log-every --checkpoint-every --keep --validate-every --validation-batches".split()


def check(recipe: Recipe, *, trains: bool = True) -> nn.Transformer:
    """Check a recipe and return the shapes of its model.

    With `trains=False` its model need not be one that learns the next token. Raises a `ValueError`, which names the
    flags, for a recipe that cannot work.
    """
    check_values(recipe)
    if not 0 < (share := recipe.text.validation) < 1:
        raise ValueError(f"--text.validation {share}: a share of the documents lies between 0 and 1; 0.05 is usual.")
    if not 0 <= recipe.seed < 2**32:
        raise ValueError(f"--seed {recipe.seed}: give a number from 0 to 2**32 - 1.")
    if recipe.sample_every < 0:
        raise ValueError(f"--sample-every {recipe.sample_every}: give the steps between samples, or 0 for none at all.")
    if recipe.profile is not None:
        parse_steps(recipe.profile)
    if recipe.compares_pairs and (recipe.text.mix or recipe.text.hub or recipe.loss_on == "all"):
        raise ValueError(
            f"--loss {recipe.loss}: the completions of pairs in --data are compared; leave --text.mix, --text.hub and "
            "--loss-on all out."
        )
    _check_vocab(recipe)
    with name_flags_in_errors(recipe):  # The library makes its own checks.
        training.LossSpikes(**dataclasses.asdict(recipe.spikes))
        shapes = model_shapes(recipe)
        if trains:
            training.check_next_token(shapes, seq=recipe.seq)
        recipe.optimizer.step(make_optimizer(recipe, shapes), loss=make_loss(recipe))
    if recipe.metrics.tensorboard:
        training.TensorBoard.package()
    if recipe.metrics.wandb is not None:
        training.WeightsAndBiases.package()
    return shapes


def check_values(recipe: Recipe) -> None:
    """Raise a `ValueError`, which names the flag, for a value that recipe.json cannot hold or a run cannot use."""
    unbounded = _flags_without_bounds(recipe.model)
    for flag, value in flags_of(recipe).items():
        _check_value(flag, value, flag in unbounded)


def parse_steps(profile: str) -> tuple[int, int]:
    """Return the first and the last step of `20:25`; raises a `ValueError` for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--profile {profile}: give the first and last step to trace, such as 20:25.")
    return int(match[1]), int(match[2])


def _check_vocab(recipe: Recipe) -> None:
    """Raise a `ValueError` if the model's vocabulary is smaller than the tokenizer's, unless it was published so."""
    if recipe.published is not None:
        return
    file, vocab, known = recipe.text.tokenizer, recipe.model.vocab, recipe_tokenizer(recipe).vocab
    if vocab < known:
        flag, subject = ("", "bytes have") if file is None else (f" --text.tokenizer {file}", "the tokenizer has")
        raise ValueError(
            f"--model.vocab {vocab}{flag}: {subject} {known} ids; leave --model.vocab out, or give at least {known}."
        )


def _flags_without_bounds(config: Any) -> set[str]:
    """Return the flags of a config whose default has an infinite number, as bounds that bound nothing."""
    is_infinite = lambda part: isinstance(part, float) and math.isinf(part)
    defaults = fields_of(type(config), "--model.")
    return {flag for flag, value, *_ in defaults if any(map(is_infinite, jax.tree.leaves(value)))}


def _check_value(flag: str, value: Any, may_be_infinite: bool) -> None:
    for part in jax.tree.leaves(value):
        if flag in _COUNTS and part < 1:
            fix = "it counts, so give at least 1"
        elif isinstance(part, float) and not (math.isfinite(part) or (may_be_infinite and math.isinf(part))):
            fix = "give a finite number"
        elif isinstance(part, int) and not -(2**63) <= part < 2**63:
            fix = "give a number of at most 64 bits"
        elif isinstance(part, str) and part.encode(errors="ignore").decode() != part:
            part, fix = ascii(part), "this is no text in UTF-8; type it anew"
        else:
            continue
        raise ValueError(f"{flag} {part}: {fix}.")
