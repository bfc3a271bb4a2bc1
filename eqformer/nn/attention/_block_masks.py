"""Models whose attention masks have blocks, for block diffusion (BD3-LM, arXiv:2503.09573)."""

from typing import TypeVar

from jaxtyping import PyTree

from ..._mask import Mask
from .._contracts import Mixer
from .._module import map_modules, modules


Model = TypeVar("Model", bound=PyTree)


def block_of(model: PyTree) -> int | None:
    """Return the number of tokens of a block if all attention masks have blocks of one size, and None otherwise."""
    blocks = {mask.block for mask in modules(model, Mask)}
    return blocks.pop() if len(blocks) == 1 else None


def only_attends(model: PyTree) -> bool:
    """Return whether the model has no encoder, and each mixer attends to keys.

    Block diffusion needs such a model: a recurrence would read masked tokens as part of the text.
    """
    return model.start is None and all(mixer.facts().attends is not None for mixer in modules(model, Mixer))


def with_blocks(model: Model, block: int) -> Model:
    """Return the model with masks by which each token sees the tokens of its block and of earlier blocks.

    The weights and the masks' windows stay the same, so that a trained causal model can continue to learn by block
    diffusion (SDAR, arXiv:2510.06303). Raises a `ValueError` for masks that have chunks or a source.
    """
    return map_modules(lambda mask: _replace_rule(mask, block), model, Mask)


def with_causal_masks(model: Model) -> Model:
    """Return the model with causal masks in place of masks of blocks.

    The caches of the returned model have the shapes that `generation.generate_blocks` needs.
    """
    return map_modules(lambda mask: mask if mask.block is None else _replace_rule(mask, None), model, Mask)


def _replace_rule(mask: Mask, block: int | None) -> Mask:
    """Return the mask with blocks of this size or, for None, a causal mask; in both cases the window stays."""
    is_causal = block is None
    return Mask(is_causal, mask.window, mask.chunk, None if is_causal else mask.ahead, mask.source, block)
