"""The record of one write of new tokens into the slots of a cache."""

import equinox as eqx
from jaxtyping import Array, Int, Num


class CacheWriteCall(eqx.Module):
    """The arguments of `memory[layer, row, ..., slot, :] = new[row]` for each token of each row."""

    memory: Num[Array, "..."]
    """A cache's array, with a dim of layers in front where there is a `layer`; of each row alone, or of its heads."""
    slots: Int[Array, "*batch seq"]
    """The slot of each token; a token is dropped whose slot is the number of slots."""
    new: Num[Array, "..."]
    """The new tokens, in the dtype of the memory."""
    layer: Int[Array, ""] | None
    """The layer of a stack that is written; None: the memory is of one layer."""
    dim: int = eqx.field(static=True)
    """The dim of the slots in `new`, and in a layer's memory."""

    operation = "cache write"

    def describe(self) -> str:
        """Return shapes and dtype for an error message."""
        return f"new {list(self.new.shape)} into memory {self.memory.dtype}{list(self.memory.shape)}"
