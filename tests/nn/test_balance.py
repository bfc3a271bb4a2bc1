"""Balance losses and their gradients against the papers' formulas in float64; training with them balances experts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import close, normal, random_module, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, EXPERTS = 3, 6
BATCH, SEQ, PADDING = 4, 8, 5
make = lambda kind, **options: random_module(kind, embed=EMBED, experts=EXPERTS, key=KEY, **options)
TOP1, TOP2 = make(nn.TopKRouter, top_k=1), make(nn.TopKRouter, top_k=2, normalize=True)
SIGMOID = make(nn.TopKRouter, top_k=3, score="sigmoid", normalize=True)
NOISY, SECOND = make(nn.NoisyTopKRouter, top_k=2), make(nn.RandomSecondRouter)
CASES: dict[str, tuple[nn.BalanceLoss, Any]] = {
    "switch": (nn.LoadBalance(0.5), TOP1),
    "mixtral": (nn.LoadBalance(0.5), TOP2),
    "gshard": (nn.LoadBalance(0.5, choices=1), SECOND),
    "deepseek-v2": (nn.LoadBalance(0.5, per="sequence"), TOP2),
    "deepseek-v3": (nn.LoadBalance(0.5, per="sequence", normalize=True), SIGMOID),
    "z": (nn.RouterZ(0.5), TOP2),
    "importance": (nn.Importance(0.5), NOISY),
    "load": (nn.NoisyLoad(0.5), NOISY),
}
NAMES = list(CASES)


def tokens_of(padding):
    """Rows of which the last `padding` tokens are none."""
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ)).copy()
    positions.reshape(-1)[BATCH * SEQ - padding :] = -1
    return nn.Tokens(jnp.asarray(positions))


def load_balance(loss, routing, real, without=""):
    """`sum_i f_i P_i` of each group times its tokens, with f_i = experts / (k T) * count and P_i the mean score."""
    scores, experts = wide(routing.scores), np.asarray(routing.experts)
    number, choices = scores.shape[-1], experts.shape[-1] if loss.choices is None else loss.choices
    if without == "padding":
        real = np.ones_like(real)
    rows = [[(row, token) for token in range(real.shape[1]) if real[row, token]] for row in range(real.shape[0])]
    if (loss.per == "batch") == (without != "per"):
        rows = [sum(rows, [])]
    cost = 0
    for row in rows:
        f, p = np.zeros(number), np.zeros(number)
        for place in row:
            for expert in experts[place][: None if without == "choices" else choices]:
                f[expert] += number / (choices * len(row)) * (expert >= 0)
            p += scores[place] / (scores[place].sum() if loss.normalize and without != "normalize" else 1) / len(row)
        cost += len(row) * (f * p).sum()
    return cost


def squared_variation(amounts, real, without=""):
    """Tokens times the variance over the squared mean of what each expert gets in all."""
    sums = np.zeros(amounts.shape[-1])
    for place in np.ndindex(real.shape):
        sums += amounts[place] * (real[place] or without == "padding")
    return real.sum() * (sums.std() / sums.mean()) ** (1 if without == "square" else 2)


def reference(loss, routing, real, without=""):
    """What a loss must be for a routing; one step may be left out."""
    if isinstance(loss, nn.LoadBalance):
        return loss.coefficient * load_balance(loss, routing, real, without)
    if isinstance(loss, nn.RouterZ):
        every = np.log(np.exp(wide(routing.logits)).sum(-1)) ** (1 if without == "square" else 2)
        return loss.coefficient * (every if without == "padding" else every * real).sum()
    if isinstance(loss, nn.NoisyLoad):
        return loss.coefficient * squared_variation(wide(routing.load), real, without)
    gates = np.zeros(routing.scores.shape)
    for row, token, choice in np.ndindex(*routing.experts.shape):
        gates[row, token, routing.experts[row, token, choice]] += routing.weights[row, token, choice]
    return loss.coefficient * squared_variation(gates, real, without)


def with_weights(router, weights):
    """The router with other maps: `weights[0]` chooses, `weights[1]` makes the noise where there is any."""
    router = eqx.tree_at(lambda r: r.linear.weight, router, weights[0])
    if not isinstance(router, nn.NoisyTopKRouter):
        return router
    return eqx.tree_at(lambda r: r.noise.weight, router, weights[1])


def routings_of(weights, x, tokens):
    """Each router's routing, all with the same maps."""
    routers = {id(router): router for _, router in CASES.values()}
    return {place: with_weights(router, weights)(x, tokens) for place, router in routers.items()}


def costs(weights, x, tokens, names=tuple(CASES), **totals):
    """Losses of `CASES`, each of its own router's routing."""
    routings = routings_of(weights, x, tokens)
    return jnp.stack([CASES[name][0](routings[id(CASES[name][1])], tokens, **totals) for name in names])


both = jax.jit(lambda weights, x, tokens: (costs(weights, x, tokens), jax.jacrev(costs)(weights, x, tokens)))
X, TOKENS, WEIGHTS = normal(1, BATCH, SEQ, EMBED), tokens_of(PADDING), normal(3, 2, EXPERTS, EMBED)


def test_each_loss_is_its_paper():
    real, found = np.asarray(TOKENS.positions >= 0), np.asarray(both(WEIGHTS, X, TOKENS)[0])
    routings: Any = jax.tree.map(np.asarray, jax.jit(routings_of)(WEIGHTS, X, TOKENS))
    steps = {"gshard": ["choices"], "deepseek-v3": ["per", "normalize"], "deepseek-v2": ["per"], "mixtral": ["per"]}
    steps |= dict.fromkeys(("z", "importance", "load"), ["square"])
    for name, value in zip(NAMES, found, strict=True):
        loss, router = CASES[name]
        routing = routings[id(router)]
        assert close(value, reference(loss, routing, real)), name
        # Padding has no weights and no load, so only losses of scores and logits could count it.
        for step in steps.get(name, []) + ([] if name in ("importance", "load") else ["padding"]):
            assert not close(value, reference(loss, routing, real, step), 1e-3), (name, step)
    assert np.array_equal(both(WEIGHTS, X.at[-1, SEQ - PADDING :].set(9.0), TOKENS)[0], found)


def test_gradients_are_the_slopes():
    with jax.enable_x64(True):
        x, weights, step = jnp.asarray(wide(X)), wide(WEIGHTS), 1e-6
        keys = jax.jit(nn.token_keys)(KEY, np.arange(BATCH), TOKENS.positions)
        tokens = nn.Tokens(TOKENS.positions, keys=keys)
        slopes = np.asarray(jax.jit(jax.jacrev(costs))(jnp.asarray(weights), x, tokens))
        places = np.eye(weights.size).reshape(-1, *weights.shape) * step
        moved = jnp.asarray(np.concatenate([weights + places, weights - places]))
        values = np.asarray(jax.jit(jax.vmap(costs, in_axes=(0, None, None)))(moved, x, tokens))
        expected = (values[: weights.size] - values[weights.size :]) / (2 * step)
    for number, name in enumerate(NAMES):
        slope = slopes[number].reshape(-1)
        assert close(slope, expected[:, number], 1e-6) and np.abs(slope[: slope.size // 2]).max() > 1e-2, name
        assert np.any(slope[slope.size // 2 :]) == (name in ("importance", "load")), name


@pytest.mark.by_default("parts of rows")
@pytest.mark.parametrize("split", ["rows", "parts of rows"])
def test_halves_that_add_their_sums_are_the_whole(split):
    """As on two devices: each sums its own tokens' costs, and `total` adds what the other counted."""
    halves: Any = jax.tree.map(
        lambda leaf: put(np.stack(np.split(leaf, 2, int(split == "parts of rows")))), (X, TOKENS)
    )
    add: Any = lambda leaf: jax.lax.psum(leaf, "half")
    frozen: Any = lambda leaf: leaf + jax.lax.stop_gradient(add(leaf) - leaf)

    names = ("switch", "deepseek-v3", "z", "importance", "load")

    def summed(weights, names=names, **totals):
        each = jax.vmap(lambda half: costs(weights, *half, names=names, **totals), axis_name="half")
        return jnp.sum(each(halves), axis=0)

    total = dict(total=add) if split == "rows" else dict(total=add, row_total=add)
    places = [NAMES.index(name) for name in names]
    wanted, slopes = (np.asarray(part)[places] for part in both(WEIGHTS, X, TOKENS))
    whole = lambda weights: summed(weights, **total)
    if split == "rows":
        shares = np.sqrt(np.arange(2.0, 2 + len(names), dtype=np.float32))
        added = lambda weights: (jnp.dot(shares, whole(weights)), whole(weights))
        slope, value = jax.jit(jax.grad(added, has_aux=True))(WEIGHTS)
        assert close(value, wanted, 1e-5) and close(slope, np.tensordot(shares, slopes, 1), 1e-5)
    else:  # counts by rows have no gradient
        assert close(jax.jit(whole)(WEIGHTS), wanted, 1e-5)
    local = {"z"} | ({"deepseek-v3"} if split == "rows" else set())
    for name, alone, value in zip(names, jax.jit(summed)(WEIGHTS), wanted, strict=True):
        assert close(alone, value, 1e-4) == (name in local), name
    if split != "rows":
        return
    # A total without a gradient gives the right loss and the wrong slope, where the loss is not linear in the sums.
    frozen_sum = lambda weights: jnp.sum(summed(weights, names[-2:], total=frozen))
    found = jax.jit(jax.value_and_grad(frozen_sum))(WEIGHTS)
    assert close(found[0], wanted[-2] + wanted[-1], 1e-5) and not close(found[1], slopes[-2] + slopes[-1], 1e-2)


def test_equal_scores_cost_one_a_token_whoever_is_chosen():
    found = dict(zip(NAMES, both(jnp.zeros_like(WEIGHTS), X, TOKENS)[0], strict=True))
    number = BATCH * SEQ - PADDING
    for name in ("switch", "mixtral", "gshard", "deepseek-v2", "deepseek-v3"):
        assert close(found[name], 0.5 * number, 1e-6), name
    assert close(found["z"], 0.5 * number * np.log(EXPERTS) ** 2, 1e-6)


def test_nothing_but_padding_costs_nothing():
    value, slope = both(WEIGHTS, X, tokens_of(BATCH * SEQ))
    assert not np.any(value) and not np.any(slope)


STEPS = 300
TOY: dict[str, tuple[Any, tuple[nn.BalanceLoss, ...], float]] = {
    "load balance": (make(nn.TopKRouter, top_k=1), (nn.LoadBalance(1.0),), 0.0),
    "per sequence": (SIGMOID, (nn.LoadBalance(1.0, per="sequence", normalize=True),), 0.0),
    "importance and load": (NOISY, (nn.Importance(0.1), nn.NoisyLoad(0.1)), 0.0),
    "selection bias": (make(nn.TopKRouter, top_k=2, score="sigmoid", balanced=True), (), 0.02),
    "nothing": (make(nn.TopKRouter, top_k=1), (), 0.0),
}


# Of each kind of means one by default, and the control.
EVERY_RUN = ("load balance", "selection bias", "nothing")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in EVERY_RUN else pytest.mark.grid) for n in TOY])
def test_a_collapsed_router_recovers(name):
    """All tokens lean one way and one expert takes that side; the loss alone must spread them again."""
    router, losses, rate = TOY[name]
    x, places = normal(1, 8, 32, EMBED).at[..., 0].add(3.0), jnp.tile(jnp.arange(32), (8, 1))
    keys = jax.jit(nn.token_keys)(KEY, jnp.arange(8), places)
    router = with_weights(router, (0.1 * normal(2, 2, EXPERTS, EMBED)).at[0, 0, 0].set(1.0))
    if rate:
        router = eqx.tree_at(lambda r: r.selection_bias, router, jnp.zeros(EXPERTS))

    def step(router, number):
        tokens = nn.Tokens(places, keys=keys).fold_in(number)

        def cost(router):
            routing = router(x, tokens)
            zero = jnp.zeros(())
            return sum((loss(routing, tokens) for loss in losses), zero) / 256, jnp.sum(routing.counts(), axis=0)

        slope, counts = eqx.filter_grad(cost, has_aux=True)(router)
        pace = 1 - number.astype(jnp.float32) / STEPS
        router = jax.tree.map(lambda leaf, slope: leaf - 0.3 * pace * slope, router, slope)
        if rate:
            bias = nn.update_selection_bias(router.selection_bias, counts, rate * pace)
            router = eqx.tree_at(lambda r: r.selection_bias, router, bias)
        return router, jnp.max(counts) * EXPERTS / jnp.sum(counts)

    worst = np.asarray(jax.jit(lambda router: jax.lax.scan(step, router, jnp.arange(STEPS))[1])(router))
    assert worst[0] > 0.8 * EXPERTS / router.top_k
    assert (worst[-10:].max() < 1.5) == (name != "nothing"), worst[-10:]


@pytest.mark.quick
def test_the_selection_bias_follows_the_missing_load():
    bias = jnp.asarray([[0.0, 1, 2], [0, 0, 0]])
    for load in (jnp.asarray([[1, 2, 3], [4, 4, 4]]), jnp.asarray([[1.0, 2, 3], [4, 4, 4]])):
        updated = nn.update_selection_bias(bias, load, 0.25)
        assert np.array_equal(updated, [[0.25, 1, 1.75], [0, 0, 0]]) and updated.dtype == jnp.float32


def test_bad_losses():
    with pytest.raises(ValueError, match=r"LoadBalance\(per='row'\).*'batch' or per 'sequence'"):
        nn.LoadBalance(0.1, per="row")
    with pytest.raises(ValueError, match=r"LoadBalance\(choices=0\).*at least the first"):
        nn.LoadBalance(0.1, choices=0)
    tokens = nn.positions_like((2,))
    with pytest.raises(ValueError, match=r"NoisyLoad.*load=None; only NoisyTopKRouter"):
        nn.NoisyLoad(0.1)(TOP1(normal(1, 2, EMBED), tokens), tokens)
    with pytest.raises(TypeError, match="abstract"):
        nn.BalanceLoss(0.1)  # pyright: ignore[reportAbstractUsage]
