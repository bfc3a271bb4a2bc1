"""Dropout: each token's mask depends only on the token's own key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import nn


KEY = jax.random.key(0)


def keys(rows, seq=3, key=KEY):
    return nn.token_keys(key, jnp.asarray(rows), jnp.broadcast_to(jnp.arange(seq), (len(rows), seq)))


def test_a_tokens_mask_is_the_same_in_any_batch():
    dropout = nn.Dropout(0.4)

    @jax.jit
    def run(ones, key):
        every = keys([0, 1, 2, 3])
        whole = dropout(ones, every), jax.vmap(dropout)(ones, every), dropout(ones, keys([0, 1, 2, 3], key=key))
        some = dropout(ones[:2], keys([3, 1])), dropout(ones[:1, 1:], keys([2])[:, 1:])
        return *whole, *some, dropout(ones[0, :1], keys([2])[0, 1:2])

    found = run(np.ones((4, 3, 64), np.float32), jax.random.key(1))
    whole, mapped, of_another_key, rows, rest, one = map(np.asarray, found)
    assert np.array_equal(rows, whole[[3, 1]]) and np.array_equal(rest, whole[2:3, 1:])
    assert np.array_equal(one, whole[2, 1:2]) and np.array_equal(mapped, whole)
    assert len(np.unique(whole.reshape(12, 64), axis=0)) == 12
    assert not np.array_equal(of_another_key, whole)


def test_the_rate_and_the_mean():
    x = jnp.full((16, 16, 64), 3.0)
    y = np.asarray(nn.Dropout(0.25)(x, keys(range(16), 16)))
    deviation = np.sqrt(0.25 * 0.75 / y.size)
    assert abs(np.mean(y == 0) - 0.25) < 4 * deviation
    assert np.all((y == 0) | (y == 4.0))
    # Channels and tokens are dropped independently: no channel is favoured.
    assert np.abs(np.mean(y == 0, axis=(0, 1)) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 256)


@pytest.mark.quick
def test_no_keys_or_no_rate_is_the_identity():
    x = jnp.ones((2, 3, 4))
    assert nn.Dropout(0.5)(x, None) is x
    assert nn.Dropout(0.0)(x, keys([0, 1])) is x


def test_gradient_passes_where_the_value_did():
    x = jnp.full((1, 3, 8), 2.0)
    y, pull = jax.vjp(lambda x: nn.Dropout(0.5)(x, keys([0])), x)
    assert np.array_equal(pull(jnp.ones_like(y))[0], np.asarray(y) / 2)


def test_a_mask_is_drawn_once_where_remat_keeps_it():
    def draws(policy):
        call = jax.checkpoint(lambda x: jnp.sum(nn.Dropout(0.5)(x, keys([0])) ** 2), policy=nn.REMAT[policy])
        return str(jax.make_jaxpr(jax.grad(call))(jnp.ones((1, 3, 8)))).count("random_bits")

    assert (draws("products"), draws("full")) == (1, 2)


def test_the_dtype_stays():
    assert nn.Dropout(0.5)(jnp.ones((1, 3, 8), jnp.bfloat16), keys([0])).dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0])
def test_the_rate_is_a_probability(rate):
    with pytest.raises(ValueError, match=rf"Dropout\(rate={rate}\).*\[0, 1\)"):
        nn.Dropout(rate)


def test_one_key_a_token():
    with pytest.raises(ValueError, match=r"Dropout\(keys of shape \(2, 2\)\): with x of shape \(2, 3, 4\)"):
        nn.Dropout(0.5)(jnp.ones((2, 3, 4)), keys([0, 1], seq=2))
