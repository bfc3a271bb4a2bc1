"""Whether a schedule, the stages' arrays and the data of a call of `pipeline_gradients` suit each other."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._schedule import Schedule


def check_data(schedule: Schedule, blocks: PyTree, data: PyTree) -> None:
    """Each chunk has as many rows of an array of blocks, and the data as many pieces as microbatches."""
    call = f"pipeline_gradients(schedule={schedule.name!r})"
    for leaf in jax.tree.leaves(data):
        if leaf.shape[:1] != (schedule.microbatches,):
            raise ValueError(
                f"{call}: the leading dim of all data is the microbatch, of which the schedule has "
                f"{schedule.microbatches}; an array has shape {leaf.shape}; reshape it to (microbatches, rows, ...)."
            )
    layers = {leaf.shape[0] for leaf in jax.tree.leaves(eqx.filter(blocks, eqx.is_array))}
    if any(number % schedule.chunks for number in layers):
        raise ValueError(
            f"{call}: the arrays of blocks have a dim of layers in front, a multiple of chunks={schedule.chunks}; "
            f"here it is {sorted(layers)}; see layer_order."
        )


def check_stream(x: PyTree, y: PyTree) -> None:
    """What comes out of a stage goes into the next."""
    if (ours := _shapes(x)) != (theirs := _shapes(y)):
        raise ValueError(
            f"pipeline_gradients(stage): a stage maps the stream to one of its shapes and dtypes, but {ours} goes "
            f"in and {theirs} comes out; let first give what stages give."
        )


def _shapes(tree: PyTree) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
