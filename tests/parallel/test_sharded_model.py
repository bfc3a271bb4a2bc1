"""Generated ids and their probabilities under a plan equal one device's for the same seed, on every mesh."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_models import filled, model_of, plan_over
from plan_parity import place

from eqformer import generation, models, nn
from eqformer.parallel import _context_attention, _sharded_cache as module, ShardedModel


PROMPTS = [[3, 5, 7, 9, 11], [4, 8, 15, 16, 23, 42, 1], [2]]
NEW = 40  # beyond the windows of these presets


def written(model, rows, temperature=0.8, **options) -> Any:
    return generation.generate(
        model,
        PROMPTS[:rows],
        max_new_tokens=NEW,
        transforms=generation.sampling(temperature=temperature),
        log_probabilities=True,
        key=jax.random.key(1),
        **options,
    )


def planned(model, plan):
    return ShardedModel(place(model, plan), plan)


def built(name):
    """With weights so large that the text is not always the same."""
    enlarge = lambda x: 2 * x if eqx.is_inexact_array(x) and x.ndim > 2 else x
    return eqx.filter_jit(lambda: jax.tree.map(enlarge, models.build(name, key=jax.random.key(0))))()


def same(one, other):
    close = np.allclose(one.log_probabilities, other.log_probabilities, atol=2e-5)
    return one.ids.shape == other.ids.shape and bool(np.array_equal(one.ids, other.ids) and close)


def test_text_is_one_devices():
    """Rows of unequal lengths, over a pipeline of unequal stages, heads and caches in pieces."""
    config = dataclasses.replace(models.FAMILIES["llama"].presets["llama-byte-1m"], layers=3, mlp=64)
    model = filled(lambda: models.build(config, key=jax.random.key(0)))
    alone = written(model, 3, 1.5)
    assert len(set(alone.ids[0].tolist())) > 10
    cut = planned(model, plan_over({"pipe": 2, "context": 2, "tensor": 2}))
    assert same(written(cut, 3, 1.5), alone)
    keys = cut.init_cache(3, 64)[0].keys
    assert model.init_cache(3, 64)[0].keys.shape[0] == 3  # and the last stage's fourth is padding
    assert keys.addressable_shards[0].data.size * 8 == keys.size == 4 * 3 * 64 * 4 * 16
    small = cut.cache_shapes(3, 64, "int8")[0]
    shard = lambda x: x.sharding.shard_shape(x.shape)
    assert small.keys.dtype == jnp.int8 and shard(small.keys) == shard(keys)
    assert small.key_scales.shape == keys.shape[:-1] and shard(small.key_scales) == shard(keys)[:-1]


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh,dtype",
    [
        (mesh, dtype)
        for mesh in ({"pipe": 2, "context": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2})
        for dtype in (None, "int8")
    ],
)
def test_text_of_rows_that_outgrow_their_frequencies(mesh, dtype):
    """Each row at a step of its own, whose keys are turned anew where they lie.

    In float64, as in float32 one of a cache's numbers that lies between two of int8 may be rounded to the other one.
    """
    scaling = nn.LongRopeScaling((1.0,) * 8, tuple(1 + 0.3 * pair for pair in range(8)), 20, 4.0)
    model = built(dataclasses.replace(models.preset("phi3-byte-500k"), window=None, scaling=scaling))
    with jax.enable_x64(True):
        model = nn.Precision("float64", "float64").apply(model)
        assert model.init_cache(3, 64)[0].rotary_lengths is not None
        alone = written(model, 3, cache_dtype=dtype)
        assert same(written(planned(model, plan_over(mesh)), 3, cache_dtype=dtype), alone)
        longer = eqx.tree_at(lambda m: m.stacks[0].blocks.mixer.layer.rotary, model, nn.Rotary(16, 10_000.0))
        assert not same(written(longer, 3, cache_dtype=dtype), alone)


@pytest.mark.grid
@pytest.mark.parametrize(
    "name,mesh",
    [
        ("llama-byte-1m", {"fsdp": 2, "tensor": 2}),
        ("gemma3-byte-500k", {"context": 2, "pipe": 2, "tensor": 2}),
        ("qwen3-next-byte-500k", {"fsdp": 2, "tensor": 2}),
    ],
)
def test_text_with_a_draft(name, mesh):
    """Of attentions over all tokens and over windows, and of states that are read again."""
    model, plan, draw = built(name), plan_over(mesh), np.random.default_rng(0)
    noisy = lambda x: x * jnp.asarray(1 + 0.2 * draw.normal(size=x.shape), x.dtype) if eqx.is_inexact_array(x) else x
    draft = jax.tree.map(noisy, model)
    alone, found = (
        written(model, 3, draft=draft),
        written(planned(model, plan), 3, draft=planned(draft, plan)),
    )
    assert same(found, alone) and 0 < alone.draft.acceptance < 1
    assert np.array_equal(found.draft.accepted, alone.draft.accepted)


@pytest.mark.grid
@pytest.mark.parametrize(
    "name,mesh,zero",
    [
        ("deepseek-v3-byte-500k", {"fsdp": 2, "tensor": 2}, 3),
        ("deepseek-v3-byte-500k", {"expert": 2, "pipe": 2, "tensor": 2}, 0),
        ("qwen3-next-byte-500k", {"replica": 2, "pipe": 2, "tensor": 2}, 0),
        ("glm4-moe-byte-500k", {"context": 2, "pipe": 2, "tensor": 2}, 0),
        ("glm4-moe-byte-500k", {"tensor": 4}, 0),
    ],
)
def test_text_that_the_models_own_predictor_drafts(name, mesh, zero):
    """The text, and what was accepted of each row, are one device's; of a predictor that is spoiled, none is."""
    model, plan = echoing(name), plan_over(mesh, zero=zero, smallest=1)
    given: dict[str, Any] = dict(draft="mtp", draft_tokens=2, temperature=0)
    alone, cut = written(model, 3, **given), planned(model, plan)
    assert np.array_equal(alone.ids, written(model, 3, 0).ids) and 0 < alone.draft.acceptance < 1
    found = written(cut, 3, **given)
    assert same(found, alone) and np.array_equal(found.draft.accepted, alone.draft.accepted)
    assert jax.tree.leaves(cut.init_predictor_cache(3, 64)) and len(cut.init_cache(3, 64)) == len(model.stacks)
    sides = lambda m: m.predictor.merge.weight
    spoiled = written(eqx.tree_at(lambda m: sides(m.model), cut, -sides(model)), 3, **given)
    assert same(spoiled, alone) and not np.array_equal(spoiled.draft.accepted, alone.draft.accepted)


def echoing(name):
    """A model that hangs mostly on its last tokens, and its predictor too, which is then right now and then."""
    model = eqx.filter_jit(lambda: models.build(name, predictor=True, key=jax.random.key(0)))()
    ends = lambda node: isinstance(node, nn.Residual)
    weak = lambda node: dataclasses.replace(node, scale=0.3) if ends(node) else node
    model = jax.tree.map(weak, model, is_leaf=ends)
    embed = model.embedding.weight.shape[1]
    first = jnp.stack([jnp.eye(embed), 0.4 * jnp.eye(embed)], axis=1)
    return eqx.tree_at(lambda m: m.predictor.merge.weight, model, first.astype(model.embedding.weight.dtype))


class Unweighed:
    """`jax.numpy`, but parts of a softmax are not weighed."""

    def __getattr__(self, name):
        return jnp.ones_like if name == "exp" else getattr(jnp, name)


@pytest.mark.grid
def test_tokens_beyond_a_cache_in_pieces_are_refused_or_nan(monkeypatch):
    """Refused where positions are known, before anything is compiled; NaN where they are not, and the others right."""
    config = models.LlamaConfig(vocab=16, embed=8, layers=1, heads=2, kv_heads=1, mlp=8)
    model = eqx.filter_jit(lambda: models.build(config, key=jax.random.key(0)))()
    cut, ids = planned(model, plan_over({"context": 2})), jnp.arange(9)[None]
    cache, tokens = cut.init_cache(1, 6), nn.positions_like((1, 9))
    with pytest.raises(ValueError, match="up to position 8 .* capacity 6"):
        cut.encode(ids, tokens, cache)
    hidden, cache, _ = eqx.filter_jit(lambda ids, tokens, cache: cut.encode(ids, tokens, cache))(ids, tokens, cache)
    assert bool(jnp.isnan(hidden[:, 6:]).all()) and sorted(cache[0].positions.reshape(-1).tolist()) == list(range(6))
    want = eqx.filter_jit(lambda ids: model.encode(ids)[0])(ids[:, :6])
    assert np.allclose(hidden[:, :6], want, atol=1e-5)
    monkeypatch.setattr(_context_attention, "jnp", Unweighed())
    unweighed = eqx.filter_jit(lambda ids, tokens, cache: cut.encode(ids, tokens, cache)[0])
    assert not np.allclose(unweighed(ids, tokens, cut.init_cache(1, 6))[:, :6], want, atol=1e-3)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["five layers", "dense, then mixtures"])
def test_stages_of_unequal_numbers_of_layers(name):
    """The model is given as it is read, and the caches of its stages have rows of padding."""
    model = model_of(name)
    cut = planned(model, plan_over({"pipe": 2}))
    sizes = lambda model: [jax.tree.leaves(cache)[0].shape[0] for cache in model.init_cache(3, 8)]
    assert (sizes(cut) != sizes(model)) and same(written(cut, 3), written(model, 3))


@pytest.mark.grid
def test_weights_that_are_gathered_and_prompts_in_chunks(monkeypatch):
    model = built("llama-byte-1m")
    alone = written(model, 3)
    assert same(written(planned(model, plan_over({"fsdp": 4}, zero=3)), 3, prefill_chunk=32), alone)
    monkeypatch.setattr(module, "_as_piece", lambda cache, pieces: cache)
    with pytest.raises(ValueError, match="NaN"):  # tokens beyond a piece that takes itself for the whole
        written(planned(model, plan_over({"context": 2}, smallest=2)), 3)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["llama-byte-1m", "deepseek-v3-byte-500k", "gemma3-byte-500k"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipe": 2}, {"context": 2}, {"context": 2, "pipe": 2, "tensor": 2}])
def test_memories_of_8_bits(name, mesh):
    """What one device gives with such caches, but for roundings that fall the other way; what they change is more."""
    model = built(name)
    ids = jnp.arange(40)[None] * 7 % 64

    def read(model, dtype):
        def run(model, ids):
            cache = model.init_cache(1, 64, dtype)
            _, cache, _ = model.encode(ids[:, :32], nn.right_padded(jnp.array([32]), 32), cache)
            hidden, _, _ = model.encode(ids[:, 32:], nn.Tokens(jnp.arange(32, 40)[None]), cache)
            return model.unembed(hidden[:, -1])

        return np.asarray(eqx.filter_jit(run)(model, ids))

    wide, small = (read(model, dtype) for dtype in (None, "int8"))
    off = np.abs(read(planned(model, plan_over(mesh)), "int8") - small).max()
    assert off < np.abs(small - wide).max() and off < 0.02 * np.abs(wide).max()


MESHES = {
    "data": {"fsdp": 2, "replica": 2},
    "tensor": {"tensor": 2},
    "shared key heads": {"tensor": 4},
    "pipe": {"pipe": 2},
    "context": {"context": 4},
    "expert": {"expert": 4, "fsdp": 2},
    "all": {"pipe": 2, "context": 2, "tensor": 2},
}


@pytest.mark.grid
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", [name for name, family in models.FAMILIES.items() if family.decodes_tokens])
def test_families(family, mesh):
    name = min((name for name in models.FAMILIES[family].presets if "byte" in name), key=len)
    sizes, model = MESHES[mesh], built(name)
    plan = plan_over(sizes)
    try:
        whole = planned(model, plan)
    except ValueError as error:  # as training would: what the mesh cannot split
        pytest.skip(str(error))
    assert same(written(whole, 3), written(model, 3))


@pytest.mark.grid
@pytest.mark.parametrize(
    "name,mesh,temperature,draft",
    [
        ("llama-byte-1m", {"fsdp": 2, "context": 2, "tensor": 2}, 0, False),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in [
                ("llama-byte-1m", {"replica": 2, "fsdp": 2, "tensor": 2}, 0.8, True),
                ("llama-byte-1m", {"tensor": 8}, 0.8, False),  # Devices with the same key head split the rows.
                ("llama-byte-1m", {"fsdp": 2, "tensor": 4}, 0.8, True),
                ("gemma3-byte-500k", {"fsdp": 2, "pipe": 2, "tensor": 2}, 0.8, False),
                ("deepseek-v2-byte-500k", {"fsdp": 2, "expert": 2, "tensor": 2}, 0.8, False),
                ("qwen3-next-byte-500k", {"fsdp": 2, "tensor": 2}, 0.8, True),
                ("t5-byte-200k", {"fsdp": 2, "tensor": 2}, 0.8, False),
            ]
        ),
    ],
)
def test_requests_of_an_engine_have_one_devices_ids(name, mesh, temperature, draft):
    model, plan = built(name), plan_over(mesh)
    draw = np.random.default_rng(0)
    requests = [
        generation.Request(draw.integers(1, 200, length).tolist(), 10, temperature=temperature, seed=number)
        for number, length in enumerate((5, 70, 1, 66, 12))
    ]

    def run(model):
        engine = generation.Engine(
            model, slots=3, capacity=128, prefill_chunk=64, stride=4, draft=model if draft else None, draft_tokens=2
        )
        return {result.number: result for result in engine.run(requests)}

    alone, sharded = run(model), run(planned(model, plan))
    for number, result in alone.items():
        assert sharded[number].ids == result.ids
        np.testing.assert_allclose(sharded[number].log_probabilities, result.log_probabilities, atol=5e-5)
    assert len({tuple(result.ids) for result in alone.values()}) == len(requests)


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh,name",
    [({"fsdp": 2, "tensor": 2}, "cached rows"), ({"tensor": 8}, "cached rows of shared key heads")],
)
def test_an_engine_without_the_exchange_of_rows_has_other_ids(mesh, name, monkeypatch):
    model, plan = built("llama-byte-1m"), plan_over(mesh)
    requests = [generation.Request([number + 5] * 9, 10) for number in range(3)]

    def run(model):
        results = generation.Engine(model, slots=3, capacity=64, stride=4).run(requests)
        return sorted((result.number, result.ids) for result in results)

    alone, gather = run(model), module.send.all_gather

    def keep(called, x, *arguments, **options):
        gathered = gather(called, x, *arguments, **options)
        return jnp.broadcast_to(x, gathered.shape) if called == name else gathered

    assert run(planned(model, plan)) == alone
    monkeypatch.setattr(module.send, "all_gather", keep)
    jax.clear_caches()
    assert run(planned(model, plan)) != alone


def test_a_token_runs_in_one_program_of_each_device():
    """The logits equal those of reading and unembedding in two programs."""
    model = model_of("tied")
    served = planned(model, plan_over({"fsdp": 2, "tensor": 2}))
    ids, tokens = jnp.array([[3], [4]]), nn.Tokens(jnp.zeros((2, 1), jnp.int32))

    def apart(ids: Any, cache: Any) -> Any:
        return served.unembed(served.encode(ids, tokens, cache)[0][:, 0])

    cache = served.init_cache(2, 4)
    decoding = jax.make_jaxpr(lambda ids, cache: served.decode(ids, tokens, cache)[0])(ids, cache)
    in_two_calls = jax.make_jaxpr(apart)(ids, cache)
    assert [str(program).count("shard_map[") for program in (decoding, in_two_calls)] == [1, 2]
    logits = eqx.filter_jit(lambda cache: served.decode(ids, tokens, cache)[0])(cache)
    np.testing.assert_allclose(logits, eqx.filter_jit(apart)(ids, cache), atol=1e-6)
