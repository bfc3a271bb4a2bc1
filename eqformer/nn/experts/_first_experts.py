"""Which expert each token takes first, in every mixture of a model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..._array_checks import checked
from .._contracts import Routed
from .._tokens import Tokens, tokens_or_default
from .._transformer import Transformer
from ._moe import MoE, ROUTER
from ._routing import Slots


@checked
def first_experts(
    model: Transformer, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None
) -> Int[Array, "mixtures *batch seq"]:
    """The number of each token's best expert, -1 for padding, a row for each mixture in the layers' order.

    Raises a `ValueError` for a model without mixtures, or whose experts choose their tokens.
    """
    aux = _showing(model).encode(ids, tokens)[2]
    stacks = [jnp.stack(jax.tree.leaves(stack), axis=1) for stack in aux if jax.tree.leaves(stack)]
    if not stacks:
        raise ValueError("first_experts(model): the model has no mixture of experts, so no token chooses one.")
    return jnp.concatenate([stack.reshape(-1, *ids.shape) for stack in stacks])


class _Showing(Routed):
    """A mixture that returns each token's first expert in the place of its `Aux`."""

    inner: MoE

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, "*batch seq"]]:
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        routing = self.inner.router(x, tokens.fold_in(ROUTER))
        if isinstance(routing, Slots):
            raise ValueError("first_experts(model): its experts choose their tokens, so tokens have no first one.")
        return self.inner(x, tokens)[0], routing.experts[..., 0]


def _showing(model: Transformer) -> Transformer:
    is_mixture = lambda node: isinstance(node, MoE)
    return jax.tree.map(lambda node: _Showing(node) if is_mixture(node) else node, model, is_leaf=is_mixture)
