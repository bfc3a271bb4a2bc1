"""Which low-rank changes of a model are trained, as plain data."""

import dataclasses

from jaxtyping import Array, Key, PyTree

from .. import nn
from ._optimizer import trainable, Trained


@dataclasses.dataclass(frozen=True)
class Lora:
    """LoRA: low-rank changes that are trained instead of the weights. Plain data: `nn.with_lora` checks it."""

    rank: int = 0
    """The rank of trained low-rank changes; 0 trains all weights."""
    alpha: float = 16.0
    """The changes are multiplied by alpha / rank."""
    maps: tuple[str, ...] = ("query", "key", "value", "output")
    """The linear maps that get one, by the ends of their names, as eqformer.nn.with_lora takes them."""

    def apply(self, model: PyTree, *, key: Key[Array, ""]) -> PyTree:
        """The model with an `nn.LoRA` in the place of each of the maps, which changes nothing before the first step."""
        return nn.with_lora(model, self.maps, rank=self.rank, alpha=self.alpha, key=key) if self.rank else model

    @property
    def trained(self) -> Trained:
        """What an optimizer takes to train the changes alone, or all weights."""
        return nn.lora_factors if self.rank else trainable
