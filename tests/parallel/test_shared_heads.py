"""Key heads that devices share in serving: each device holds a head once, and caches are split by rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import SilentMixer
from plan_models import model_of, plan_over
from plan_parity import place

from eqformer import models, nn
from eqformer.parallel import _sharded_model, ShardedModel


CONFIG = models.LlamaConfig(vocab=32, embed=32, layers=2, heads=8, kv_heads=2, mlp=32)
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (6, 9)))


def built(config=CONFIG):
    return eqx.filter_jit(lambda: models.build(config, key=jax.random.key(0)))()


@eqx.filter_jit
def read(model, ids):
    """Logits after a prompt of six tokens and after each of three more, and the cache."""
    rows, places = ids.shape[0], jnp.broadcast_to(jnp.arange(9), ids.shape)
    hidden, cache, _ = model.encode(ids[:, :6], nn.right_padded(jnp.full(rows, 6), 6), model.init_cache(rows, 12))

    def one_more(cache, given):
        ids, places = given
        hidden, cache, _ = model.encode(ids[:, None], nn.Tokens(places[:, None]), cache)
        return cache, model.unembed(hidden[:, 0])

    cache, found = jax.lax.scan(one_more, cache, (ids[:, 6:].T, places[:, 6:].T))
    return jnp.concatenate([model.unembed(hidden[:, -1])[None], found]), cache


@pytest.mark.grid
def test_pairs_of_devices_share_a_key_head(monkeypatch):
    """Four devices and two key heads: the logits are one device's, and each has half of a head's rows, of six."""
    model = built()
    served = ShardedModel(place(model, plan := plan_over({"tensor": 4})), plan)
    assert served.kv_row_shards == 2 and nn.modules(served.model, nn.Attention)[0].key.weight.shape[1] == 4
    wanted = np.asarray(read(model, IDS)[0])
    found, cache = read(served, IDS)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    keys = cache[0].keys
    assert keys.addressable_shards[0].data.shape == (2, 3, 1, 12, 4) and keys.size * 2 == 2 * 6 * 4 * 12 * 4
    monkeypatch.setattr(_sharded_model, "count_kv_row_shards", lambda *_: 1)
    whole = ShardedModel(place(model, plan), plan).cache_shapes(6, 12)[0].keys
    assert whole.sharding.shard_shape(whole.shape) == (2, 6, 1, 12, 4)  # as it was: all rows on both of a pair


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"tensor": 4, "fsdp": 2}, {"tensor": 4, "context": 2}, {"tensor": 8}])
def test_shared_key_heads_beside_other_axes(mesh):
    model = built()
    served = ShardedModel(place(model, plan := plan_over(mesh)), plan)
    assert served.kv_row_shards == mesh["tensor"] // 2
    np.testing.assert_allclose(read(served, IDS[:5])[0], read(model, IDS[:5])[0], atol=2e-5)


@pytest.mark.quick
def test_what_else_is_of_heads_or_in_stages_keeps_all_rows():
    """Sinks, and pipelines, whose rows go through in pieces; heads that divide over the devices are not shared."""
    kv_row_shards = lambda model, mesh: ShardedModel(model, plan_over(mesh)).kv_row_shards
    shapes, heads = eqx.filter_eval_shape(built), {"tensor": 4}
    sinks = eqx.filter_eval_shape(lambda: models.build("gpt-oss-byte-500k", key=jax.random.key(0)))
    few = nn.modules(sinks, nn.Attention)[0].key.sizes["kv_heads"]
    assert few < 4 and kv_row_shards(sinks, heads) == 1
    assert [kv_row_shards(shapes, mesh) for mesh in (heads, heads | {"pipe": 2}, {"tensor": 2})] == [2, 1, 1]


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"tensor": 4}, {"tensor": 4, "fsdp": 2}, {"tensor": 2, "pipe": 2}])
def test_mixers_side_by_side_have_key_heads_each_for_itself(mesh):
    """Two key heads of an attention, which pairs of four devices hold with all rows, and four of a recurrence."""
    model, ids = model_of("mixers side by side"), IDS % 50
    served = ShardedModel(place(model, plan := plan_over(mesh)), plan)
    assert served.kv_row_shards == 1
    attended, recurrent = served.init_cache(6, 12)[0]
    assert attended.keys.shape[-3] == max(2, mesh["tensor"]) and recurrent.state.shape[-3] == 8
    assert recurrent.state.addressable_shards[0].data.shape[-3] == 8 // mesh["tensor"]
    np.testing.assert_allclose(read(served, ids)[0], read(model, ids)[0], atol=2e-5)


class OwnAttention(SilentMixer):
    """A user's own mixer, which attends like the library's and declares this."""

    def facts(self):
        """Return the facts of the attention."""
        return self.inner.facts()


class QuietAttention(SilentMixer):
    """A mixer that declares slices of its heads, and no attention."""

    def facts(self):
        """Return that the mixer runs on slices of its heads."""
        return nn.MixerFacts(splits_heads=True)


def with_mixers(kind, model):
    """The model with mixers of a user's own."""
    is_attention = lambda node: isinstance(node, nn.Attention)
    return jax.tree.map(lambda node: kind(node) if is_attention(node) else node, model, is_leaf=is_attention)


def test_a_mixer_of_ones_own_says_whether_it_attends_by_rows():
    shapes, plan = eqx.filter_eval_shape(built), plan_over({"tensor": 4})
    assert [ShardedModel(with_mixers(kind, shapes), plan).kv_row_shards for kind in (OwnAttention, QuietAttention)] == [
        2,
        1,
    ]


@pytest.mark.grid
def test_a_mixer_of_ones_own_shares_key_heads():
    model = built()
    served = ShardedModel(place(with_mixers(OwnAttention, model), plan := plan_over({"tensor": 4})), plan)
    np.testing.assert_allclose(read(served, IDS)[0], read(model, IDS)[0], atol=2e-5)
