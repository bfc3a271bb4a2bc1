"""Mixtures within blocks, stacks and models: their statistics in results, in the loss and in a step's metrics."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import EMBED, EXPERTS, KEY, KINDS
from nn_reference import close, normal, random_module, wide

from eqformer import Batch, nn, training


BATCH, SEQ, VOCAB = 2, 6, 7
PLACES = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ)).copy()
PLACES[-1, 4:] = -1
REAL = int(np.sum(PLACES >= 0))
TOKENS = nn.Tokens(jnp.asarray(PLACES))
IN_TRAINING = nn.Tokens(TOKENS.positions, keys=nn.token_keys(KEY, jnp.arange(BATCH), jnp.maximum(PLACES, 0)))
MORE = EXPERTS + 2
FEW = nn.Capacity(0.5)
as_numpy: Any = lambda tree: jax.tree.map(np.asarray, tree)


class Still(nn.Mixer):
    """Attends to nothing, and compiles in no time."""

    def __call__(self, x, tokens=None, cache=None):
        return jnp.zeros_like(x), cache

    def init_cache(self, batch, capacity, dtype="float32"):
        return None


def moe(key, experts=EXPERTS, dispatch=None):
    """A mixture that costs something."""
    losses = (nn.LoadBalance(0.5), nn.RouterZ(0.25))
    router = nn.TopKRouter(embed=EMBED, experts=experts, top_k=2, normalize=True, key=key)
    return nn.MoE(router, nn.Experts(KINDS["plain"], experts, key=key), dispatch=dispatch, losses=losses)


def block(key, feed_forward=moe, attention=None, **options):
    norm = nn.RMSNorm("embed", embed=EMBED)
    return nn.Block(nn.Residual(attention or Still(), norm), nn.Residual(feed_forward(key, **options), norm))


dense, few = partial(block, feed_forward=KINDS["plain"]), partial(block, dispatch=nn.Capacity(0.75))


def period(key):
    """A dense block, then one with a mixture of few slots."""
    return nn.SuperBlock((dense(key), few(key)))


def transformer(*stacks):
    """A model of stacks, each `(make, layers, remat)`."""
    make = lambda: nn.Transformer(
        nn.Embedding(vocab=VOCAB, embed=EMBED, key=KEY),
        tuple(nn.with_execution(nn.Stack(make, layers, key=KEY), remat=remat) for make, layers, remat in stacks),
        nn.RMSNorm("embed", embed=EMBED),
    )
    return random_module(make)


@pytest.fixture(scope="module")
def model():
    """Dense blocks and mixtures in turn, then a mixture of more experts, then a dense block."""
    return transformer((period, 2, "full"), (partial(few, experts=MORE), 1, "none"), (dense, 1, "none"))


def all_close(one, other, tolerance=1e-5):
    """Whether two trees are one but for rounding."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return all(close(*pair, tolerance) for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.grid
def test_blocks_and_periods_hand_on_what_mixtures_tell(model):
    @eqx.filter_jit
    def run(period, x):
        dense, few = period.blocks
        h, _, none = dense(x, IN_TRAINING)
        fed, given_aux = few.feed_forward.layer(few.feed_forward.norm(h), IN_TRAINING)
        return period(x, IN_TRAINING), few(h, IN_TRAINING), h + fed, none, given_aux

    given = model.stacks[0][0], normal(1, 2, SEQ, EMBED)
    (y, cache, pair), (same, _, aux), expected, none, given_aux = as_numpy(run(*given))
    assert cache is None and none is None and all_close([y, same], [expected] * 2)
    assert isinstance(aux, nn.Aux) and all_close(aux, given_aux) and all_close(pair, (None, given_aux))
    assert aux.load.shape == (EXPERTS,) and aux.load.sum() == 2 * REAL and aux.dropped > 0


@pytest.mark.grid
def test_a_stack_puts_layers_in_front_of_what_they_tell(model):
    @eqx.filter_jit
    def run(stack, x):
        h, each = x, []
        for layer in stack:
            h, _, one = layer(h, TOKENS)
            each.append(one)
        return stack(x, TOKENS)[::2], (h, jax.tree.map(lambda *leaf: jnp.stack(leaf), *each))

    found, expected = as_numpy(run(model.stacks[0], normal(1, BATCH, SEQ, EMBED)))
    assert all_close(found, expected)
    (aux,) = nn.aux_of(found)
    assert aux.loss.shape == (2,) and aux.load.shape == (2, EXPERTS) and aux.entropy[0] != aux.entropy[1]
    names = nn.dims(model.stacks[0]).blocks.blocks[1].feed_forward.layer
    assert names.experts.mlps.down.weight == "layers experts embed mlp"
    assert names.router.linear.weight == "layers candidates embed"


def batch():
    """Two rows, the second of them padded, with unequal weights."""
    draw = np.random.default_rng(0)
    ids, targets = draw.integers(0, VOCAB, (2, BATCH, SEQ)).astype(np.int32)
    weights = (draw.random((BATCH, SEQ)) < 0.7).astype(np.float32) * (PLACES >= 0)
    return Batch(ids, targets, weights, np.arange(BATCH, dtype=np.int32), PLACES)


def test_a_model_tells_stack_by_stack_and_the_loss_adds_it(model):
    given = batch()

    @eqx.filter_jit
    def by_hand(model, given):
        hidden, cache, given_aux = model.encode(jnp.asarray(given.ids), TOKENS)
        logits = jax.nn.log_softmax(model.unembed(hidden))
        nats = -jnp.sum(jnp.take_along_axis(logits, given.targets[..., None], axis=-1)[..., 0] * given.weights)
        return nats, given_aux, cache

    nats, given_aux, cache = as_numpy(by_hand(model, given))
    assert cache is None and len(given_aux) == 3 and given_aux[2] is None and given_aux[0][0] is None
    found = nn.aux_of(given_aux)
    assert found[0] is given_aux[0][1] and found[1] is given_aux[1] and [len(aux.load) for aux in found] == [2, 1]
    extra = sum(wide(aux.loss).sum() for aux in found)
    assert close(nn.aux_loss(given_aux), extra, 1e-6) and extra > 1
    assert nn.aux_of((None, (None,))) == [] and nn.aux_loss((None, (None,))) == 0
    total, tally = as_numpy(eqx.filter_jit(training.next_token_loss)(model, given))
    assert isinstance(tally, training.LossAux) and tally.count == given.weights.sum()
    assert close(total, wide(nats) + extra, 1e-5) and all_close(tally.aux, given_aux)
    assert len(eqx.filter_eval_shape(model, given.ids, TOKENS)) == 2  # a call gives logits and cache alone


def test_without_mixtures_a_loss_has_a_count_and_nothing_to_tell():
    bare = transformer((dense, 1, "none"))
    _, count = eqx.filter_eval_shape(training.next_token_loss, bare, batch())
    assert isinstance(count, jax.ShapeDtypeStruct) and training.routing_metrics(jnp.ones(())) == {}
    assert training.routing_metrics(training.LossAux(jnp.ones(()), (None, (None,)))) == {}


def aux_of_rows(rows):
    """What two layers of four experts, and one of six, might tell of a batch's rows: sums over them."""
    sums = {name: jnp.sum(value, axis=0) for name, value in rows.items()}

    def aux(place, number):
        loss, load, dropped, entropy = (sums[name][place] for name in ("loss", "load", "dropped", "entropy"))
        return nn.Aux(loss, load[..., :number], dropped, entropy, jnp.full_like(dropped, rows["load"].shape[0] * SEQ))

    return (None, aux(slice(2), EXPERTS)), aux(2, MORE)


def test_a_step_s_metrics():
    """Against numpy, of two microbatches; one layer has more experts than the others."""
    draw = np.random.default_rng(0)
    rows: dict[str, Any] = {name: draw.random((4, 3)).astype(np.float32) for name in ("loss", "entropy")}
    rows |= {"load": draw.integers(0, 9, (4, 3, MORE)), "dropped": draw.integers(0, 3, (4, 3))}
    rows["load"][:, :2, EXPERTS:] = 0

    def cost(weight, rows, key):
        return jnp.sum(weight * rows["loss"]), training.LossAux(jnp.sum(rows["entropy"]), aux_of_rows(rows))

    weight = jnp.ones(())
    optimizer = training.optimizer("sgd", weight, rate=0.1)
    step = training.make_step(cost, optimizer, microbatches=2)
    metrics = as_numpy(step(training.init_state(weight, optimizer), rows)[1])
    load, sums = rows["load"].sum(axis=0), {name: value.sum(axis=0) for name, value in rows.items()}
    share = load / load.sum(axis=-1, keepdims=True)
    expected = {
        "count": sums["entropy"].sum(),
        "balance_loss": sums["loss"].sum() / sums["entropy"].sum(),
        "dropped_share": sums["dropped"].sum() / load.sum(),
        "router_entropy": (sums["entropy"] / (4 * SEQ)).mean(),
        "load_violation": max(share[:2].max() * EXPERTS, share[2].max() * MORE) - 1,
        "expert_load": share,
    }
    for name, value in expected.items():
        assert close(metrics[name], value, 1e-6) and np.any(value > 0.01), name


@pytest.mark.grid
def test_the_first_expert_of_each_token_in_every_mixture(model):
    ids = jnp.asarray([[3, 1, 4, 1, 5, 2], [6, 0, 6, 5, 3, 1]])
    last = lambda m: m.stacks[1].blocks.feed_forward.layer.router.linear.weight
    model = eqx.tree_at(last, model, last(model).at[:, EXPERTS:].multiply(3))  # so that some token takes one of these
    found = eqx.filter_jit(nn.first_experts)(model, ids, TOKENS)

    def layer_by_layer(model, x):
        blocks: list[Any] = [block for place in range(2) for block in model.stacks[0][place].blocks]
        blocks += [model.stacks[1][0], model.stacks[2][0]]
        for layer in blocks:
            if isinstance(layer.feed_forward.layer, nn.MoE):
                router: Any = layer.feed_forward.layer.router
                yield layer.feed_forward.norm(x) @ router.linear.weight.T
            x = layer(x, TOKENS)[0]

    all_logits = lambda model: list(layer_by_layer(model, model.embedding(ids)))
    wanted = [np.where(PLACES >= 0, np.argmax(logits, -1), -1) for logits in eqx.filter_jit(all_logits)(model)]
    assert found.shape == (3, BATCH, SEQ) and np.array_equal(found, wanted)
    assert not np.array_equal(found[0], found[1]) and found[2].max() >= EXPERTS  # layers differ, and so do stacks
    with pytest.raises(ValueError, match="no mixture of experts"):
        nn.first_experts(eqx.tree_at(lambda m: m.stacks, model, model.stacks[2:]), ids)
    router = nn.ExpertChoiceRouter(embed=EMBED, experts=EXPERTS, factor=1.0, key=KEY)
    router = jax.tree.map(lambda x: x[None], router)  # of one layer
    taking = eqx.tree_at(lambda m: m.stacks[1].blocks.feed_forward.layer.router, model, router)
    with pytest.raises(ValueError, match="experts choose their tokens"):
        nn.first_experts(taking, ids)


@pytest.mark.grid
@pytest.mark.parametrize("dispatch", [nn.Dropless(), FEW, nn.Capacity(0.5, per="batch")], ids=str)
def test_cached_calls_equal_the_uncached_pass(dispatch):
    """A token's experts are its own choice, whatever comes before, beside or after it, and in whatever pieces."""
    ids, other = jnp.asarray([[[3, 1, 4, 1, 5, 2], [6, 0, 6, 5, 3, 1]], [[3, 1, 4, 6, 2, 0], [6, 0, 6, 0, 4, 4]]])
    attention = lambda key: nn.Attention(embed=EMBED, heads=1, head_dim=4, rotary=nn.Rotary(4, 100.0), key=key)
    model = transformer((lambda key: block(key, attention=attention(key), dispatch=dispatch), 1, "none"))
    run = jax.jit(lambda ids, tokens: model(ids, tokens)[0])
    step = jax.jit(lambda ids, places, cache: model(ids, nn.Tokens(places), cache))
    places = jnp.broadcast_to(jnp.arange(SEQ, dtype=jnp.int32), ids.shape)
    whole = run(ids, nn.Tokens(places))
    for size in (1, SEQ // 2):
        cache, found = model.init_cache(BATCH, SEQ), []
        for first in range(0, SEQ, size):
            piece = slice(first, first + size)
            logits, cache = step(np.asarray(ids)[:, piece], places[:, piece], cache)
            found.append(np.asarray(logits))
        assert close(np.concatenate(found, axis=1), whole, 1e-5), size
    # Later tokens change nothing; in training, where there are few slots, they do: first choices go before second ones.
    assert close(run(other, nn.Tokens(places))[:, :3], whole[:, :3], 1e-6)
    trained = lambda given: run(given, nn.Tokens(places, keys=IN_TRAINING.keys))[:, :3]
    assert close(trained(ids), trained(other), 1e-3) == isinstance(dispatch, nn.Dropless)
