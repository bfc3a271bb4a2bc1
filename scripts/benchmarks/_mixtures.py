"""Rows about mixtures of experts: one layer, forward and backward, against a dense one and other programs."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks import _peers
from benchmarks._measure import gradient_rows, Gradients, rate_rows, Row, seconds_in_turn
from eqformer import nn


EMBED, MLP, TOP_K, ROWS, SEQ = 256, 512, 2, 8, 512
TOKENS = ROWS * SEQ


class OneHotMoE(eqx.Module):
    """Dispatch and combination as products with one-hot arrays of floats (GShard, arXiv:2006.16668, algorithm 2).

    Tokens are taken in groups of so many; in each, every expert has `factor` times the slots that even loads need.
    """

    moe: nn.MoE
    group: int = eqx.field(static=True)
    factor: float = eqx.field(static=True, default=1.25)

    def __call__(self, x: Float[Array, "rows seq embed"]) -> tuple[Float[Array, "rows seq embed"], None]:
        """The layer without its statistics."""
        experts = len(self.moe.experts)
        slots = int(self.factor * TOP_K * self.group / experts)
        routing = self.moe.router(x, nn.positions_like(x.shape[:-1]))
        assert isinstance(routing, nn.Routing)
        groups = x.reshape(-1, self.group, EMBED)
        chosen = jax.nn.one_hot(routing.experts.reshape(-1, self.group, TOP_K), experts)  # group token choice expert
        turns = jnp.swapaxes(chosen, 1, 2).reshape(len(groups), -1, experts)  # first choices go first
        place = jnp.swapaxes((jnp.cumsum(turns, 1) - turns).reshape(len(groups), TOP_K, -1, experts), 1, 2)
        kept = chosen * (place < slots)
        slot = jax.nn.one_hot(jnp.sum(place * kept, -1).astype(jnp.int32), slots)  # group token choice slot
        weights = routing.weights.reshape(-1, self.group, TOP_K)
        combine = jnp.einsum("gtke,gtks,gtk->gtes", kept, slot, weights)
        dispatch = (combine > 0).astype(x.dtype)
        rows = jnp.einsum("gtes,gtd->egsd", dispatch, groups)
        y = self.moe.experts.slots(rows.reshape(experts, -1, EMBED)).reshape(rows.shape)
        return jnp.einsum("gtes,egsd->gtd", combine, y).reshape(x.shape), None


def mixtures(rounds: int) -> Iterator[Row]:
    """Tokens a second of a layer of 8 experts, two a token, forward and backward, and of others of equal work."""
    x = jax.random.normal(jax.random.key(1), (ROWS, SEQ, EMBED))
    layers: dict[str, Callable[..., Any]] = {
        "eqformer, dropless": InTraining(moe(8)),
        "eqformer, capacity 1.25": InTraining(moe(8, nn.Capacity(1.25))),
        "dense layer of equal work": Dense(nn.GatedMLP(embed=EMBED, mlp=TOP_K * MLP, key=jax.random.key(2))),
        "one-hot products, 1.25, groups of a row": OneHotMoE(moe(8), SEQ),
        "one-hot products, 1.25, one group": OneHotMoE(moe(8), TOKENS),
    }
    contenders: dict[str, Callable[[], Any]] = {name: Gradients(layer, x) for name, layer in layers.items()}
    if _peers.are_installed():
        for kind in ("eager", "grouped_mm"):
            contenders[f"transformers, {kind}"] = _peers.mixtral_layer(np.asarray(x), mlp=MLP, experts=8, kind=kind)
    yield from gradient_rows("mixture", TOKENS, contenders, rounds)
    numbers, choices = (8, 16, 32, 64), jnp.repeat(x.reshape(TOKENS, EMBED), TOP_K, axis=0)
    more = {f"{number} experts": Gradients(InTraining(moe(number)), x) for number in numbers}
    even = {f"{number} experts alone, even loads": Gradients(Even(moe(number).experts), choices) for number in numbers}
    for some in (more, even):
        yield from rate_rows("number of experts", "tokens/s", TOKENS, seconds_in_turn(some, rounds))


class InTraining(eqx.Module):
    """A mixture on tokens that are trained on: on others, no dispatch drops a choice."""

    moe: nn.MoE

    def __call__(self, x: Float[Array, "rows seq embed"]) -> tuple[Float[Array, "rows seq embed"], nn.Aux]:
        """The layer's output and its aux."""
        keys = jax.random.split(jax.random.key(3), x.shape[:-1])
        return self.moe(x, nn.Tokens(nn.positions_like(x.shape[:-1]).positions, keys=keys))


class Dense(eqx.Module):
    """A dense layer that is called as a mixture is."""

    mlp: nn.GatedMLP

    def __call__(self, x: Float[Array, "rows seq embed"]) -> tuple[Float[Array, "rows seq embed"], None]:
        """The layer's output, and no aux."""
        return self.mlp(x), None


class Even(eqx.Module):
    """Experts on rows sorted by expert, of which all have equally many."""

    experts: nn.Experts

    def __call__(self, x: Float[Array, "rows embed"]) -> tuple[Float[Array, "rows embed"], None]:
        """The rows' outputs, and no aux."""
        number = len(self.experts)
        return self.experts.sorted_rows(x, jnp.full(number, len(x) // number, jnp.int32)), None


def moe(experts: int, dispatch: nn.Dropless | nn.Capacity | None = None) -> nn.MoE:
    """A mixture of gated experts, two a token."""
    router, each = jax.random.split(jax.random.key(0))
    return nn.MoE(
        nn.TopKRouter(embed=EMBED, experts=experts, top_k=TOP_K, normalise=True, key=router),
        nn.Experts(lambda key: nn.GatedMLP(embed=EMBED, mlp=MLP, key=key), experts, key=each),
        dispatch=dispatch,
    )
