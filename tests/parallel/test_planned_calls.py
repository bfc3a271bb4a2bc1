"""A model under a plan is called like the plain model: with ids alone, with `Tokens`, and with a cache."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_models import model_of
from plan_parity import place

from eqformer import nn
from eqformer.parallel import make_mesh, Plan, ShardedModel
from eqformer.parallel._check_plan import check_model_class


@pytest.fixture(scope="module")
def both():
    """A model, and the same over eight devices."""
    model, plan = model_of("llama"), Plan(make_mesh(fsdp=2, pipe=2, tensor=2))
    return model, ShardedModel(place(model, plan), plan)


def test_it_is_called_like_the_model(both):
    """Of three rows, which are no multiple of the devices that split them, one is shorter."""
    model, planned = both
    ids = np.random.default_rng(0).integers(0, model.vocab, (3, 6), np.int32)
    tokens = nn.right_padded(jnp.array([6, 6, 4]), 6)
    is_there = np.asarray(tokens.positions) >= 0
    run = eqx.filter_jit(lambda model, ids, tokens: model(ids, tokens)[0])
    got, want = run(planned, ids, tokens), run(model, ids, tokens)
    np.testing.assert_allclose(got[is_there], want[is_there], rtol=1e-4, atol=1e-4)
    other = run(model, ids + 1, tokens)
    assert not np.allclose(got[is_there], other[is_there], rtol=1e-2, atol=1e-2)


@pytest.mark.grid
def test_a_cache_goes_on_where_it_was(both):
    model, planned = both
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab, (4, 6), np.int32))
    first, then = (nn.Tokens(jnp.broadcast_to(jnp.arange(*ends), (4, 3))) for ends in ((0, 3), (3, 6)))
    cache = planned.init_cache(4, 6)
    _, cache = planned(ids[:, :3], first, cache)
    got, _ = planned(ids[:, 3:], then, cache)
    want, nothing = planned(ids)
    assert nothing is None
    np.testing.assert_allclose(got, want[:, 3:], rtol=1e-4, atol=1e-4)
    assert not np.allclose(planned(ids[:, 3:])[0], got, rtol=1e-2, atol=1e-2)  # which knows nothing of the first


def test_what_is_no_transformer_is_named(both):
    with pytest.raises(ValueError, match=r"Plan.check\(model\): a plan runs an nn.LanguageModel.* is an MLP; put"):
        check_model_class(nn.MLP(embed=4, mlp=4, key=jax.random.key(0)))
    check_model_class(both[0])
