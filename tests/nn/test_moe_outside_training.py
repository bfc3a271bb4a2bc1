"""Outside of training, a mixture drops no token, whatever its dispatch and its experts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from moe_cases import EMBED, EXPERTS, experts_of, KEY, router_of
from nn_reference import close, normal, random_module, replaced
from test_moe import BATCH, DISPATCHES, KEYS, PLACES, SEQ, tokens_of, X

from eqformer import nn


class Squared(eqx.Module):
    """An expert with a parameter that is no map's: rows sorted by expert cannot run it."""

    gain: Float[Array, "embed"]

    def __call__(self, x):
        return self.gain * x * x


class Tied(eqx.Module):
    """An expert whose parameters are a map's, which it also reads."""

    up: nn.Linear

    def __call__(self, x):
        return jax.nn.gelu(self.up(x)) @ self.up.weight.astype(x.dtype)


def test_experts_that_read_their_maps_run_outside_of_training_too():
    make = lambda key: Tied(nn.Linear("embed -> mlp", embed=EMBED, mlp=4, key=key))
    experts, router = random_module(nn.Experts, make, EXPERTS, key=KEY), router_of(top_k=2)
    moe = nn.MoE(router, experts, dispatch=nn.Capacity(0.5))
    trained = nn.MoE(router, experts, dispatch=nn.Capacity(float(EXPERTS)))  # in which every choice finds a slot
    assert not experts.only_call_maps() and experts_of("gated").only_call_maps()
    run = jax.jit(lambda x, tokens, none: (trained(x, tokens)[0], moe(x, none)[0], moe(x, tokens)[0]))
    expected, seen, dropped = run(X, tokens_of(), tokens_of(None))
    assert close(seen, expected, 1e-6) and not close(dropped, expected, 1e-2)


SQUARES = replaced(experts_of(), mlps=Squared(jnp.asarray(normal(5, EXPERTS, EMBED))))


@pytest.mark.grid
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_outside_of_training_a_token_depends_on_itself_alone(top_k):
    """Not on later tokens, other rows or the length of the call: for all dispatches, and experts of any kind."""
    mixtures = [(experts_of("gated"), dispatch) for dispatch in DISPATCHES] + [(SQUARES, nn.Capacity(0.5))]

    @jax.jit
    def run(weight, x, tokens):
        router = eqx.tree_at(lambda r: r.linear.weight, router_of(top_k=top_k), weight)
        moes = [nn.MoE(router, experts, dispatch=dispatch) for experts, dispatch in mixtures]
        called = [moe(x, tokens) for moe in moes]
        return jnp.stack([y for y, _ in called]), jnp.stack([aux.dropped for _, aux in called])

    seen = lambda keys, part: tokens_of(None if keys is None else keys[:, part], PLACES[:, part])
    parts = lambda keys, x, size: [
        run(weight, x[:, at : at + size], seen(keys, slice(at, at + size)))[0] for at in range(0, SEQ, size)
    ]
    breaks = {"later": 0, "pieces": 0, "tokens": 0}
    for draw in range(4):
        weight, later = normal(10 + draw, EXPERTS, EMBED), SEQ // 2
        other = np.where(np.arange(SEQ)[:, None] < later, X, normal(20 + draw, BATCH, SEQ, EMBED))
        for keys in (None, KEYS):
            whole, dropped = run(weight, X, seen(keys, slice(None)))
            changed, _ = run(weight, other, seen(keys, slice(None)))
            same = {
                "later": (whole[:, :, :later], changed[:, :, :later]),
                "pieces": (whole, np.concatenate(parts(keys, X, later), axis=2)),
                "tokens": (whole, np.concatenate(parts(keys, X, 1), axis=2)),
            }
            if keys is None:
                assert not np.any(dropped) and not close(whole, changed, 1e-2)
                assert all(close(one, two, 1e-5) for one, two in same.values())
            else:  # the control: slots of training are another thing
                assert np.all(dropped[2:] > 0) and not np.any(dropped[:2])
                for name, (one, two) in same.items():
                    breaks[name] += not close(one, two, 1e-3)
    assert min(breaks.values()) > 0
