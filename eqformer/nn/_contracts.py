"""Contracts of the modules that a block or a stack holds, and the `Aux` of routed layers."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..kernels import Mask
from ._dims import modules
from ._module import Module
from ._tokens import Tokens


Channels = tuple[tuple[int, ...], ...]  # (heads, channels of each) of what a token has; a cost adds them up


class Attends(NamedTuple):
    """What a mixer passes to its attention core, its field `core`, whose exchange lets rows be cut over devices."""

    mask: Mask
    """Which keys a query may see."""
    query: Channels
    """The queries' heads and channels."""
    key: Channels
    """The keys'."""
    value: Channels
    """The values'."""
    output: Channels
    """The output's."""
    needs: tuple[str, ...] = ()
    """Which of `softcap`, `sinks` and `bias` the core must compute; `source`: the keys are of another sequence."""


@dataclasses.dataclass(frozen=True)
class MixerFacts:
    """What transforms and cost formulas must know of a mixer; the defaults are safe for any mixer.

    Sizes are those of the slice that a device holds.

    - `splits_heads`: whether it runs on a slice of its `heads`, `kv_heads` or `mlp`: its maps out of the stream return
      such slices, and the results of its maps back into the stream are summed over devices. Beside maps and norms it
      may make of its input what each number gives by itself; a map reads that too, but not in a `sequence` stream. If
      not, or if an array that belongs to no map is of `embed` and of these, every device runs the whole of it.
    - `attends`: None for one that needs whole rows: it reads tokens in turn, chooses among all of them, or makes
      something of neighbours beside its core, of which a device with a piece of a row knows some.
    - `operations`: a token, beyond those of its linear maps and its core; a multiplication and an addition are two.
    - `shares_kv_heads`: whether devices may have a key head in common, each with some of the heads that it serves.
    """

    splits_heads: bool = False
    attends: Attends | None = None
    operations: int | float = 0
    shares_kv_heads: bool = True


class Mixer(Module):
    """What mixes tokens and can remember them: an attention, or a recurrence."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Map the tokens of `x`, reading and extending the cache where one is given."""

    @abc.abstractmethod
    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens, with a name for each dim of its arrays."""

    def facts(self) -> MixerFacts:
        """What transforms and cost formulas must know; by default what is safe for any mixer."""
        return MixerFacts()


class ScoreBias(Module):
    """What is added to the scores of a model's attentions that say so (`Attention(score_bias=True)`), by positions.

    It runs on a slice of its heads: its arrays name their dim `heads`, or are the same for all heads.
    """

    @abc.abstractmethod
    def __call__(self, queries: Tokens, keys: Tokens) -> Float[Array, "*batch heads seq kv_seq"]:
        """What is added for each query and key, in float32 at least."""


class FeedForward(Module):
    """A layer for each token by itself that runs on a slice of its `mlp` hidden features.

    Its maps out of the stream to `mlp` then give such a slice, and what its maps back into the stream give is summed
    over slices. What other maps out of the stream give, such as a number for each token, every device has whole.
    Beside maps and norms it may make of its input what each number gives by itself. Arrays that belong to no map name
    their dims: those of `embed` act on the stream, those of `mlp` on slices, and with one of both all is run whole.
    A layer for which this does not hold is a plain function, of which every device runs the whole.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""


class Routed(Module):
    """A feed-forward layer that routes tokens: it reads their keys and padding too, and returns an `Aux`."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """The layer's output and an `Aux`."""

    def rebalanced(self, aux: PyTree, rate: float | Float[Array, ""]) -> "Routed":
        """The layer after a step with this `Aux`, its loads moved by `rate` towards even ones; the same by default."""
        return self


class Layer(Module):
    """What a stack repeats: a block, a period of blocks, a residual sublayer alone."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Map the tokens of `x`, extending the cache where one is given; third, the `Aux` of routed layers, or None."""

    @abc.abstractmethod
    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens; None where there is nothing to remember."""


class ChunkedUnembedding(Module):
    """What gives logits of all ids, and also of a part of them at a time, as where no device has its table whole."""

    @abc.abstractmethod
    def parts(self) -> tuple[PyTree, PyTree]:
        """Arrays of each part, with a dim of parts in front: those that have gradients, and others."""

    @abc.abstractmethod
    def of_part(self, moving: PyTree, rest: PyTree) -> tuple[Module, Int[Array, "part"]]:
        """What stands in its place to give a part's logits, and the part's ids; -1 where a logit is none."""


class Aux(eqx.Module):
    """The auxiliary losses and counts of a mixture of experts, each a sum over the tokens of a call without padding.

    In a stack, each array has a `layers` dim in front. `loss` is added to the sum of the tokens' losses; `load` counts
    the choices of each expert, also those dropped; `entropy` sums the entropy of each token's scores, in nats.
    """

    loss: Float[Array, "*layers"]
    load: Int[Array, "*layers experts"]
    dropped: Int[Array, "*layers"]
    entropy: Float[Array, "*layers"]
    tokens: Int[Array, "*layers"]


def aux_of(aux: PyTree) -> list[Aux]:
    """Every `Aux` in what a model or a part of one returned as aux, in the order of its layers."""
    return modules(aux, Aux)


def aux_loss(aux: PyTree) -> Float[Array, ""]:
    """The sum of all losses of routed layers; zero where there are none."""
    first, *others = [jnp.sum(one.loss) for one in aux_of(aux)] or [jnp.zeros((), jnp.float32)]
    return sum(others, start=first)
