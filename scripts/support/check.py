"""Checks a recipe, before anything is written."""

import dataclasses
import math
import re
from typing import Any

from recipes import Recipe

from eqformer import nn, training
from support.flags import flags_of
from support.published import tokenizer_of
from support.setup import optimizer_of, shapes_of


_COUNTS = "--steps --seq --batch --log-every --checkpoint-every --keep --validate-every".split()
_COUNTS += "--validation-batches --execution.unroll".split()


def check(recipe: Recipe) -> nn.Transformer:
    """The shapes of the recipe's model; raises a `ValueError`, which names the flags, for a recipe that cannot work."""
    for flag, value in flags_of(recipe).items():
        _check_value(flag, value)
    if not 0 < (share := recipe.text.validation) < 1:
        raise ValueError(f"--text.validation {share}: a share of the documents lies between 0 and 1; 0.05 is usual.")
    if not 0 <= recipe.seed < 2**32:
        raise ValueError(f"--seed {recipe.seed}: give a number from 0 to 2**32 - 1.")
    if recipe.sample_every < 0:
        raise ValueError(f"--sample-every {recipe.sample_every}: give the steps between samples, or 0 for none at all.")
    if recipe.profile is not None:
        steps_of(recipe.profile)
    training.Spikes(**dataclasses.asdict(recipe.spikes))  # which makes its own checks
    _check_vocab(recipe)
    shapes = shapes_of(recipe)
    _check_task(shapes)
    if shapes.positions is not None and recipe.seq > (longest := shapes.positions.weight.shape[0]):
        raise ValueError(
            f"--seq {recipe.seq}: the model has {longest} learned positions; give --model.max-seq {recipe.seq} or a "
            f"--seq of at most {longest}."
        )
    chosen, optimizer = recipe.optimizer, optimizer_of(recipe, shapes)
    if chosen.clip is not None and chosen.clip <= 0:
        raise ValueError(f"--optimizer.clip {chosen.clip}: the largest norm is positive; none switches clipping off.")
    for name in ("weight_decay", "z_loss", "balance_rate"):
        if (value := getattr(chosen, name)) < 0:
            raise ValueError(f"--optimizer.{name.replace('_', '-')} {value}: give 0, which is none, or more.")
    training.make_step(training.next_token_loss, optimizer, clip=chosen.clip)  # which makes its own checks
    if recipe.metrics.tensorboard:
        training.TensorBoard.package()
    if recipe.metrics.wandb is not None:
        training.WeightsAndBiases.package()
    return shapes


def steps_of(profile: str) -> tuple[int, int]:
    """The first and the last step of `20:25`; raises a `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+):(\d+)", profile)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--profile {profile}: give the first and last step to trace, such as 20:25.")
    return int(found[1]), int(found[2])


def _check_task(model: nn.Transformer) -> None:
    """Raise a `ValueError` for a model that learns something else than the next token of a text."""
    if model.start is not None:
        raise ValueError(
            "--recipe, --model: the model's encoder reads a text beside the one that is written, and a run's texts are "
            "not pairs; train it by the library, on eqformer.data.paired(sources, targets)."
        )
    for path, mixer in nn.named_modules(model, nn.Mixer):
        attends = mixer.facts().attends
        if attends is not None and not attends.mask.is_causal:
            raise ValueError(
                f"--recipe, --model: in {path} a token sees later ones, so nothing is learned by predicting the next; "
                "train the model by the library, on eqformer.training.masked_batch(batch, ...)."
            )


def _check_vocab(recipe: Recipe) -> None:
    """Raise a `ValueError` if the model's vocabulary is smaller than the tokenizer's, unless it was published so."""
    if recipe.published is not None:
        return
    file, vocab, known = recipe.text.tokenizer, recipe.model.vocab, tokenizer_of(recipe).vocab
    if vocab < known:
        given, whose = ("", "bytes have") if file is None else (f" --text.tokenizer {file}", "the tokenizer has")
        raise ValueError(
            f"--model.vocab {vocab}{given}: {whose} {known} ids; leave --model.vocab out, or give at least {known}."
        )


def _check_value(flag: str, value: Any) -> None:
    """Raise a `ValueError` for a value that recipe.json cannot hold or a run cannot use."""
    for part in value if isinstance(value, tuple) else ():
        _check_value(flag, part)
    if flag in _COUNTS and isinstance(value, int) and value < 1:
        raise ValueError(f"{flag} {value}: it counts, so give at least 1.")
    if isinstance(value, float) and not math.isfinite(value):
        none = "; none switches clipping off" if flag == "--optimizer.clip" else ""
        raise ValueError(f"{flag} {value}: give a finite number{none}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{flag} {value}: give a number of at most 64 bits.")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{flag} {ascii(value)}: this is no text in UTF-8; type it anew.") from error
