"""Rows about single layers (recurrences, mixtures of experts), forward and backward, beside other programs' layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks import _peers
from benchmarks._measure import gradient_rows, Gradients, rate_rows, Row, seconds_in_turn
from eqformer import kernels, nn


EMBED = 256
HEADS, HEAD_DIM, STATE, MIXER_ROWS = 8, 64, 128, 2
MLP, TOP_K, MOE_ROWS, MOE_SEQ = 512, 2, 8, 512
TOKENS = MOE_ROWS * MOE_SEQ
TOO_LARGE = 4096, "channel delta net"  # One row is measured, because PyTorch stores several residuals of 1 GB.
PEERS: dict[str, Callable[[np.ndarray], Callable[[], None]]] = {
    "gated delta net": lambda x: _peers.delta_net(x, heads=HEADS, kv_heads=HEADS // 2, head_dim=HEAD_DIM),
    "channel delta net": lambda x: _peers.channel_delta_net(x, heads=HEADS, head_dim=HEAD_DIM),
    "mamba2": lambda x: _peers.mamba2(x, heads=HEADS, state=STATE, head_dim=HEAD_DIM),
    "short convolution": _peers.short_conv,
}


def mixers(rounds: int) -> Iterator[Row]:
    """Tokens a second of recurrences, forward and backward, beside causal attention and transformers' layers."""
    sizes: dict[str, Any] = {"embed": EMBED, "heads": HEADS}
    key = jax.random.key(0)
    attention = nn.Attention(
        **sizes, kv_heads=HEADS // 2, head_dim=HEAD_DIM, core=kernels.BlockwiseAttention(), key=key
    )
    layers: dict[str, nn.Mixer] = {
        "gated delta net": nn.GatedDeltaNet(**sizes, kv_heads=HEADS // 2, head_dim=HEAD_DIM, v_dim=HEAD_DIM, key=key),
        "channel delta net": nn.ChannelDeltaNet(**sizes, head_dim=HEAD_DIM, key=key),
        "mamba2": nn.Mamba2Mixer(**sizes, kv_heads=1, head_dim=STATE, v_dim=HEAD_DIM, key=key),
        "short convolution": nn.GatedShortConv(embed=EMBED, key=key),
    }
    for seq in (512, 4096):
        x = jax.random.normal(jax.random.key(1), (MIXER_ROWS, seq, EMBED))
        ours = {name: Gradients(layer, x) for name, layer in {**layers, "attention": attention}.items()}
        compared = [name for name in PEERS if _peers.are_installed() and (seq, name) != TOO_LARGE]
        theirs = {name: PEERS[name](np.asarray(x)) for name in compared}
        peer_name = "{} of transformers".format
        contenders: dict[str, Callable[[], Any]] = {**ours, **{peer_name(name): peer for name, peer in theirs.items()}}
        times = seconds_in_turn(contenders, rounds)
        for name in layers:  # All layers take turns; a group has a layer's row and the rows of its comparisons.
            compared_names = [label for label in (name, "attention", peer_name(name)) if label in times]
            group = f"{name}, {seq} tokens"
            yield from gradient_rows(
                group, MIXER_ROWS * seq, contenders, {label: times[label] for label in compared_names}
            )
            if _peers.are_installed() and (seq, name) == TOO_LARGE:
                one_row = {name: Gradients(layers[name], x[:1]), peer_name(name): PEERS[name](np.asarray(x[:1]))}
                yield from gradient_rows(f"{group}, one row", seq, one_row, seconds_in_turn(one_row, rounds))


def _apply_one_hot(layer: nn.MoE, x: Float[Array, "rows seq embed"], group: int) -> Float[Array, "rows seq embed"]:
    """Dispatch and combine tokens by products with one-hot float arrays (GShard, arXiv:2006.16668, algorithm 2).

    Tokens are split into groups of `group` tokens. In each group, an expert has 1.25 times the slots that even loads
    need.
    """
    experts = len(layer.experts)
    slots = int(1.25 * TOP_K * group / experts)
    routing = layer.router(x, nn.positions_like(x.shape[:-1]))
    assert isinstance(routing, nn.Routing)
    groups = x.reshape(-1, group, EMBED)
    choices = jax.nn.one_hot(routing.experts.reshape(-1, group, TOP_K), experts)  # group token choice expert
    ordered = jnp.swapaxes(choices, 1, 2).reshape(len(groups), -1, experts)  # First choices go first.
    position = jnp.swapaxes((jnp.cumsum(ordered, 1) - ordered).reshape(len(groups), TOP_K, -1, experts), 1, 2)
    fitting = choices * (position < slots)
    slot = jax.nn.one_hot(jnp.sum(position * fitting, -1).astype(jnp.int32), slots)  # group token choice slot
    weights = routing.weights.reshape(-1, group, TOP_K)
    combine = jnp.einsum("gtke,gtks,gtk->gtes", fitting, slot, weights)
    dispatch = (combine > 0).astype(x.dtype)
    rows = jnp.einsum("gtes,gtd->egsd", dispatch, groups)
    y = layer.experts.slots(rows.reshape(experts, -1, EMBED)).reshape(rows.shape)
    return jnp.einsum("gtes,egsd->gtd", combine, y).reshape(x.shape)


def _route_for_training(layer: nn.MoE, x: Float[Array, "rows seq embed"]) -> Float[Array, "rows seq embed"]:
    """Apply a mixture to tokens with random keys, as in training; without keys, no choice of an expert is dropped."""
    keys = jax.random.split(jax.random.key(3), x.shape[:-1])
    return layer(x, nn.Tokens(nn.positions_like(x.shape[:-1]).positions, keys=keys))[0]


def _apply_evenly(experts: nn.Experts, x: Float[Array, "rows embed"]) -> Float[Array, "rows embed"]:
    """Apply experts to rows sorted by expert, with the same number of rows for each expert."""
    return experts.sorted_rows(x, jnp.full(len(experts), len(x) // len(experts), jnp.int32))


def mixtures(rounds: int) -> Iterator[Row]:
    """Tokens a second of 8 experts, two for each token, forward and backward, and of other layers of equal work."""
    x = jax.random.normal(jax.random.key(1), (MOE_ROWS, MOE_SEQ, EMBED))
    dense = nn.GatedMLP(embed=EMBED, mlp=TOP_K * MLP, key=jax.random.key(2))
    contenders: dict[str, Callable[[], Any]] = {
        "eqformer, dropless": Gradients(_make_moe(8), x, _route_for_training),
        "eqformer, capacity 1.25": Gradients(_make_moe(8, nn.Capacity(1.25)), x, _route_for_training),
        "dense layer of equal work": Gradients(dense, x, lambda layer, x: layer(x)),
        "one-hot products, 1.25, groups of a row": Gradients(_make_moe(8), x, partial(_apply_one_hot, group=MOE_SEQ)),
        "one-hot products, 1.25, one group": Gradients(_make_moe(8), x, partial(_apply_one_hot, group=TOKENS)),
    }
    if _peers.are_installed():
        for kind in ("eager", "grouped_mm"):
            contenders[f"transformers, {kind}"] = _peers.mixtral_layer(np.asarray(x), mlp=MLP, experts=8, kind=kind)
    yield from gradient_rows("mixture", TOKENS, contenders, seconds_in_turn(contenders, rounds))
    counts, rows = (8, 16, 32, 64), jnp.repeat(x.reshape(TOKENS, EMBED), TOP_K, axis=0)
    mixtures_by_count = {f"{number} experts": Gradients(_make_moe(number), x, _route_for_training) for number in counts}
    experts_alone = {
        f"{number} experts alone, even loads": Gradients(_make_moe(number).experts, rows, _apply_evenly)
        for number in counts
    }
    for group in (mixtures_by_count, experts_alone):
        yield from rate_rows("number of experts", "tokens/s", TOKENS, seconds_in_turn(group, rounds))


def _make_moe(experts: int, dispatch: nn.Dropless | nn.Capacity | None = None) -> nn.MoE:
    """Return a mixture of gated experts, with two experts for each token."""
    router_key, experts_key = jax.random.split(jax.random.key(0))
    return nn.MoE(
        nn.TopKRouter(embed=EMBED, experts=experts, top_k=TOP_K, normalize=True, key=router_key),
        nn.Experts(lambda key: nn.GatedMLP(embed=EMBED, mlp=MLP, key=key), experts, key=experts_key),
        dispatch=dispatch,
    )
