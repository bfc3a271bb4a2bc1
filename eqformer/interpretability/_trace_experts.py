"""`trace_experts`: the experts that the tokens of a text take in each mixture of a model, and their weights."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._shapes import next_power_of_two
from ._capture import capture
from ._points import find_nodes


class LayerExperts(NamedTuple):
    """The experts that each token of a text takes in one layer, best first."""

    layer: int
    """The index of the layer in the model, from 0."""
    experts: Int[np.ndarray, "tokens top_k"]
    """The indices of the experts; -1 means no expert, with weight 0."""
    weights: Float[np.ndarray, "tokens top_k"]
    """The weights of the experts' outputs."""


def expert_layers(model: PyTree) -> list[int]:
    """Return the indices of the layers in which tokens choose experts; empty for a model that cannot be traced.

    Layers of an encoder or of a predictor for speculative decoding do not count, and neither does a mixture whose
    experts choose their tokens. A sharded model cannot be traced.
    """
    return [layer for layer, _ in _find_routers(model)]


def trace_experts(model: PyTree, ids: Sequence[int], source: Sequence[int] | None = None) -> list[LayerExperts]:
    """Return the experts that read each token of a text, for each of the `expert_layers(model)` in their order.

    One pass without a cache reads the text. The text is padded to a power of two of at least 64 tokens, but not beyond
    the learned positions, so that texts of other lengths mostly reuse the compiled program.

    Args:
        model: The language model.
        ids: The tokens of the text; in a model with an encoder, the decoder's tokens, beginning with the start id.
        source: The ids that the encoder reads; None for a model without an encoder.

    Raises:
        ValueError: For a model whose tokens choose no experts, and for more ids than learned positions.
    """
    call, routers = "trace_experts(model, ids)", _find_routers(model)
    if not routers:
        raise ValueError(f"{call}: the tokens choose no experts in a layer that can be traced; see `expert_layers`.")
    if model.max_seq is not None and len(ids) > model.max_seq:
        raise ValueError(
            f"{call}: there are {len(ids)} ids, but the model has {model.max_seq} learned positions; shorten the text."
        )
    padded_ids, tokens = _pad(ids, model.max_seq)
    if source is not None:
        tokens = nn.with_source(tokens, nn.Source(*_pad(source, None)))
    chosen = _route(model, tuple(path for _, path in routers), padded_ids, tokens)
    arrays = [(np.asarray(experts)[0, : len(ids)], np.asarray(weights)[0, : len(ids)]) for experts, weights in chosen]
    return [LayerExperts(layer, *arrays_of_layer) for (layer, _), arrays_of_layer in zip(routers, arrays)]


@eqx.filter_jit
def _route(
    model: PyTree, paths: tuple[str, ...], ids: Int[Array, "1 seq"], tokens: nn.Tokens
) -> list[tuple[Int[Array, "1 seq top_k"], Float[Array, "1 seq top_k"]]]:
    """Return the choices of the routers at these paths; the compiled program computes no logits."""
    captured = capture(model, paths)(ids, tokens)
    return [(captured[path].experts, captured[path].weights) for path in paths]


def _pad(ids: Sequence[int], limit: int | None) -> tuple[Int[Array, "1 seq"], nn.Tokens]:
    """Return a row of ids, padded to a power of two or to the limit, and its tokens."""
    width = next_power_of_two(len(ids), least=_MIN_WIDTH)
    padded = np.zeros((1, width if limit is None else min(width, limit)), np.int32)
    padded[0, : len(ids)] = ids
    return jnp.asarray(padded), nn.right_padded(jnp.asarray([len(ids)], jnp.int32), padded.shape[1])


_MIN_WIDTH = 64
_IN_STACK = re.compile(r"stacks\[(\d+)\]\.blocks\.(?:blocks\[(\d+)\]\.)?")


def _find_routers(model: PyTree) -> list[tuple[int, str]]:
    """Return the indices of the layers whose tokens choose experts, in order, each with its router's path."""
    routers: list[tuple[int, str]] = []
    for node in find_nodes(model) if isinstance(model, nn.LanguageModel) else ():
        match = _IN_STACK.match(node.path)
        if match and isinstance(node.module, nn.Router) and not node.module.facts().expert_choice:
            stack, member = int(match[1]), int(match[2] or 0)
            first = sum(len(earlier) * len(earlier.blocks.members) for earlier in model.stacks[:stack])
            step, suffix = len(model.stacks[stack].blocks.members), node.path.removeprefix(f"stacks[{stack}].blocks")
            numbers = range(len(model.stacks[stack]))
            routers += [(first + number * step + member, f"stacks[{stack}][{number}]{suffix}") for number in numbers]
    return sorted(routers)
