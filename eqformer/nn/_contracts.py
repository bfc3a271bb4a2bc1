"""What modules must be to stand in a block or a stack: abstract modules, which anybody's own may follow."""

import abc
from collections.abc import Sequence

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from ._tokens import Tokens


class Mixer(eqx.Module):
    """What mixes tokens and can remember them: an attention, or a recurrence."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Map the tokens of `x`, reading and extending the cache where one is given."""

    @abc.abstractmethod
    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens."""


class Routed(eqx.Module):
    """A feed-forward layer that routes tokens: it reads their keys and padding too, and returns an `Aux`."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """The layer's output and an `Aux`."""


class Layer(eqx.Module):
    """What a stack repeats: a block, a period of blocks, a residual sublayer alone."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Map the tokens of `x`, extending the cache where one is given; third, the `Aux` of routed layers, or None."""

    @abc.abstractmethod
    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens; None where there is nothing to remember."""
