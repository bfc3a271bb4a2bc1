"""What routers and dispatches must be to stand in a mixture: abstract modules, which anybody's own may follow."""

import abc
import dataclasses

from jaxtyping import Array, Float, Int, Num

from .._module import Module
from .._tokens import Tokens
from ._experts import Experts
from ._routing import Routing, Slots


@dataclasses.dataclass(frozen=True)
class RouterFacts:
    """What a router says of itself.

    - `experts`: how many there are to choose from.
    - `choices`: how many a token takes at most; how many on average, where experts choose their tokens.
    - `among`: the tokens that a choice depends on, which a device must have: a "token" alone, all of its row
      ("sequence") or all of the call ("batch").
    - `gives_slots`: experts choose their tokens, so that it gives `Slots`.
    """

    experts: int
    choices: int | float
    among: str
    gives_slots: bool = False


class Router(Module):
    """What brings tokens and experts together, computed in float32 at least; padding goes nowhere.

    Noise is drawn from each token's own key and there is none without keys, so a token's experts are the same in any
    batch and on any mesh. Every device runs the whole of a router, on all features of a token.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Routing | Slots:
        """Choose experts for each token, or tokens for each expert, and their weights."""

    @abc.abstractmethod
    def facts(self) -> RouterFacts:
        """What mixtures, transforms and costs must know."""

    def rebalanced(self, load: Num[Array, "*layers experts"], rate: float | Float[Array, ""]) -> "Router":
        """The router after a step in which experts had this load, moved by `rate`; the same unless it has a rule.

        In a stack its arrays have a dim of `layers` in front, as `load` has.
        """
        return self


class Dispatch(Module):
    """How tokens reach the experts that they chose."""

    @abc.abstractmethod
    def __call__(
        self, experts: Experts, x: Float[Array, "*batch seq embed"], routing: Routing, *, weighs_inputs: bool = False
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """The weighted sum of each token's experts whose choices are kept, and the number of dropped choices."""

    @abc.abstractmethod
    def kept(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """The choices that are kept, with -1 for others, and the number of dropped choices."""

    @abc.abstractmethod
    def without_drops(self, experts: Experts, routing: Routing) -> "Dispatch":
        """A dispatch of these experts, which may be those of one device, that drops no choice of all tokens."""

    @abc.abstractmethod
    def among(self, facts: RouterFacts) -> str:
        """The tokens on which it depends whether a choice is kept, as in `RouterFacts`; "token" where all are."""
