"""Rows about mixtures of experts: one layer, forward and backward, against a dense one and other programs."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks import _peers
from benchmarks._measure import gradient_rows, Gradients, rate_rows, Row, seconds_in_turn
from eqformer import nn


EMBED, MLP, TOP_K, ROWS, SEQ = 256, 512, 2, 8, 512
TOKENS = ROWS * SEQ


def one_hot(layer: nn.MoE, x: Float[Array, "rows seq embed"], group: int) -> Float[Array, "rows seq embed"]:
    """Dispatch and combination as products with one-hot arrays of floats (GShard, arXiv:2006.16668, algorithm 2).

    Tokens are taken in groups of so many; in each, every expert has 1.25 times the slots that even loads need.
    """
    experts = len(layer.experts)
    slots = int(1.25 * TOP_K * group / experts)
    routing = layer.router(x, nn.positions_like(x.shape[:-1]))
    assert isinstance(routing, nn.Routing)
    groups = x.reshape(-1, group, EMBED)
    chosen = jax.nn.one_hot(routing.experts.reshape(-1, group, TOP_K), experts)  # group token choice expert
    turns = jnp.swapaxes(chosen, 1, 2).reshape(len(groups), -1, experts)  # first choices go first
    place = jnp.swapaxes((jnp.cumsum(turns, 1) - turns).reshape(len(groups), TOP_K, -1, experts), 1, 2)
    kept = chosen * (place < slots)
    slot = jax.nn.one_hot(jnp.sum(place * kept, -1).astype(jnp.int32), slots)  # group token choice slot
    weights = routing.weights.reshape(-1, group, TOP_K)
    combine = jnp.einsum("gtke,gtks,gtk->gtes", kept, slot, weights)
    dispatch = (combine > 0).astype(x.dtype)
    rows = jnp.einsum("gtes,gtd->egsd", dispatch, groups)
    y = layer.experts.slots(rows.reshape(experts, -1, EMBED)).reshape(rows.shape)
    return jnp.einsum("gtes,egsd->gtd", combine, y).reshape(x.shape)


def in_training(layer: nn.MoE, x: Float[Array, "rows seq embed"]) -> Float[Array, "rows seq embed"]:
    """A mixture on tokens that are trained on: on others, no dispatch drops a choice."""
    keys = jax.random.split(jax.random.key(3), x.shape[:-1])
    return layer(x, nn.Tokens(nn.positions_like(x.shape[:-1]).positions, keys=keys))[0]


def even(experts: nn.Experts, x: Float[Array, "rows embed"]) -> Float[Array, "rows embed"]:
    """Experts on rows sorted by expert, of which all have equally many."""
    return experts.sorted_rows(x, jnp.full(len(experts), len(x) // len(experts), jnp.int32))


def mixtures(rounds: int) -> Iterator[Row]:
    """Tokens a second of a layer of 8 experts, two a token, forward and backward, and of others of equal work."""
    x = jax.random.normal(jax.random.key(1), (ROWS, SEQ, EMBED))
    dense = nn.GatedMLP(embed=EMBED, mlp=TOP_K * MLP, key=jax.random.key(2))
    contenders: dict[str, Callable[[], Any]] = {
        "eqformer, dropless": Gradients(moe(8), x, in_training),
        "eqformer, capacity 1.25": Gradients(moe(8, nn.Capacity(1.25)), x, in_training),
        "dense layer of equal work": Gradients(dense, x, lambda layer, x: layer(x)),
        "one-hot products, 1.25, groups of a row": Gradients(moe(8), x, partial(one_hot, group=SEQ)),
        "one-hot products, 1.25, one group": Gradients(moe(8), x, partial(one_hot, group=TOKENS)),
    }
    if _peers.are_installed():
        for kind in ("eager", "grouped_mm"):
            contenders[f"transformers, {kind}"] = _peers.mixtral_layer(np.asarray(x), mlp=MLP, experts=8, kind=kind)
    yield from gradient_rows("mixture", TOKENS, contenders, seconds_in_turn(contenders, rounds))
    numbers, choices = (8, 16, 32, 64), jnp.repeat(x.reshape(TOKENS, EMBED), TOP_K, axis=0)
    more = {f"{number} experts": Gradients(moe(number), x, in_training) for number in numbers}
    alone = {f"{number} experts alone, even loads": Gradients(moe(number).experts, choices, even) for number in numbers}
    for some in (more, alone):
        yield from rate_rows("number of experts", "tokens/s", TOKENS, seconds_in_turn(some, rounds))


def moe(experts: int, dispatch: nn.Dropless | nn.Capacity | None = None) -> nn.MoE:
    """A mixture of gated experts, two a token."""
    router, each = jax.random.split(jax.random.key(0))
    return nn.MoE(
        nn.TopKRouter(embed=EMBED, experts=experts, top_k=TOP_K, normalise=True, key=router),
        nn.Experts(lambda key: nn.GatedMLP(embed=EMBED, mlp=MLP, key=key), experts, key=each),
        dispatch=dispatch,
    )
