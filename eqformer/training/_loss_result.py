"""What a loss of one's own must take and give, said in one error where it does not."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..parallel import TENSOR, varying_axes
from ._tally import Count, Tally


def sum_and_count(found: Any, loss_fn: Callable[..., Any]) -> tuple[Float[Array, ""], Count]:
    """What a loss gave: a sum and a count, which may be a number of Python's; a `ValueError` for anything else."""
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    total, tally = cast(tuple[Any, Any], found if is_pair else (found, None))
    count: Any = tally.count if isinstance(tally, Tally) else tally
    shapes = [jnp.shape(x) for x in (total, count)] if is_pair else []
    if shapes != [(), ()]:
        given = f"two of shapes {shapes[0]} and {shapes[1]}" if is_pair else _described(found)
        raise ValueError(
            f"{_name(loss_fn)}(model, batch, key): a loss gives the sum over tokens and their count, two numbers, of "
            f"which those of microbatches and devices are added before one division; this one gave {given}. Return "
            "(sum, count)."
        )
    total = jnp.asarray(total)
    if isinstance(tally, Tally):
        return total, tally
    count = jnp.asarray(tally)
    return total, count if jnp.issubdtype(count.dtype, jnp.inexact) else count.astype(total.dtype)


def check_takes_tokens(loss_fn: Callable[..., Any]) -> None:
    """Raise a `ValueError` for a loss that cannot be called under a plan, with a device's tokens and vocabulary."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # a callable that does not say
        return
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    missing = {"tokens", "vocabulary"} - {parameter.name for parameter in parameters}
    if missing and not takes_all:
        raise ValueError(
            f"make_step({_name(loss_fn)}, plan=...): under a plan a loss is called as loss_fn(model, batch, None, "
            f"tokens=..., vocabulary=...), and this one takes no {' and no '.join(sorted(missing))}; take both, and "
            "pass them on to next_token_loss, or tokens to model.encode and vocabulary.nats to cross_entropy(nats=)."
        )


def check_whole(total: Float[Array, ""], loss_fn: Callable[..., Any], size: int) -> None:
    """Raise a `ValueError` for a sum that differs over `tensor`, of `size` devices, which have the same tokens."""
    if TENSOR in varying_axes(total):
        raise ValueError(
            f"{_name(loss_fn)} under Plan over tensor={size}: the sum differs between devices that have the same "
            "tokens, so it is made of slices as if they were whole: of logits, or of weights. Read logits by "
            "cross_entropy(nats=vocabulary.nats), and leave penalties of weights to the optimizer, as weight_decay."
        )


def _described(found: object) -> str:
    return "one value" if not isinstance(found, tuple | list) else f"{len(found)} values"


def _name(loss_fn: Callable[..., Any]) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
