"""Users' own linear maps, mixers and blocks run over every axis, because rooms rely on contracts, not on classes."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plan_controls as control
import pytest
from contract_cases import is_seen, named, of_plan, ROUNDING, SilentMixer, STAGES, ZERO
from nn_reference import normal
from plan_blocks import Int8Map
from plan_models import model_of
from plan_parity import Case, differences, of_one_device, of_plan as afresh, place, total_of_plan

from eqformer import generation, nn, planning
from eqformer.parallel import _fully_sharded, replicated_layers, ShardedModel
from eqformer.parallel._shard_map import take_local_slice
from eqformer.parallel.tensor import _residual_stream as _stream
from eqformer.recipes import report


KEY = jax.random.key(0)
FEATURE = Case("llama int4 int8", {"tensor": 4}, {"residual": "feature"})
SPLIT = Case("llama int8", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1})
EXPERTS = Case("mixture int8", {"fsdp": 2, "expert": 2, "tensor": 2}, ZERO | {"residual": "feature"})
MORE = [
    SPLIT,
    EXPERTS,
    Case("llama int8", {"pipe": 2, "tensor": 2}, STAGES),
    Case("shared mixture int8", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("llama int8", {"tensor": 2}, {"residual": "sequence"}),
    Case("llama int8", {"fsdp": 4, "tensor": 2}, {"zero": 2, "residual": "feature", "overlap": "ring"}, "full"),
    Case("gpt2 int8", {"tensor": 4}),
    Case("jaxformer int8", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature"}),
    Case(
        "shared mixture int8", {"fsdp": 2, "expert": 2}, {"zero": 3, "expert_method": "exchange", "expert_factor": 0.5}
    ),
    Case("llama int8", {"fsdp": 2, "pipe": 2}, {"zero": 2, "microbatches": 2}),
]


ROUNDED = [FEATURE]


@pytest.mark.parametrize("case", named([], [*ROUNDED, *MORE]))
def test_maps_of_eight_bits_are_split_like_any(case):
    """Those of feed-forward layers in four, where the name says so."""
    want = of_one_device(case)
    maps: list[Any] = list(nn.linear_maps(want.gradients))
    assert all(jnp.any(one.scales if isinstance(one, nn.QuantizedLinear) else one.scale) for one in maps)
    kinds = {Int8Map, nn.QuantizedLinear} if "int4" in case.name else {Int8Map}
    assert kinds <= {type(one) for one in maps}
    assert differences(of_plan(case), want, ROUNDING) == {}


@pytest.mark.grid
def test_the_scales_of_outputs_are_gathered_where_sums_are_of_all(monkeypatch):
    """Without it a device would scale all outputs by its own ones' scales."""
    assert not is_seen(FEATURE)
    tiled = lambda x, dim: jnp.concatenate([x] * jax.lax.axis_size("tensor"), dim)
    monkeypatch.setattr(_fully_sharded, "gather_parameter", tiled)
    assert is_seen(FEATURE)


def test_a_map_of_eight_bits_takes_factors_and_gives_them_back():
    x = normal(0, 3, 6)

    @eqx.filter_jit
    def build_and_run():
        linear = Int8Map.of(nn.Linear("embed -> heads head_dim", embed=6, heads=2, head_dim=4, bias=True, key=KEY))
        up = nn.Linear("rank -> heads head_dim", rank=2, heads=2, head_dim=4, key=KEY)
        lora = eqx.tree_at(lambda m: m.up, nn.with_lora(linear, [Int8Map], rank=2, alpha=1.0, key=KEY), up)
        merged = nn.merge_lora(lora)
        return linear, lora, merged, linear(x), lora(x), merged(x)

    linear, lora, merged, *outputs = build_and_run()
    expected = np.einsum("hde,be->bhd", np.asarray(linear.rounded) * np.asarray(linear.scale)[..., None], x)
    expected += np.asarray(linear.bias) + 0.5 * np.einsum("hdr,re,be->bhd", lora.up.weight, lora.down.weight, x)
    assert isinstance(merged, nn.Linear) and merged.weight.dtype == jnp.float32
    assert all(np.allclose(output, expected, atol=1e-5) for output in outputs[1:])
    assert not np.allclose(outputs[0], expected, atol=1e-3)


@pytest.mark.quick
def test_maps_of_eight_bits_are_counted_like_any():
    plain, rounded = model_of("llama"), model_of("llama int8")
    forward = planning.flops_per_token(plain, 16, backward=False)
    assert planning.flops_per_token(rounded, 16, backward=False) == forward
    # Rounded weights have no gradients.
    assert planning.flops_per_token(plain, 16) > planning.flops_per_token(rounded, 16) > 2 * forward


MIXED = [Case("fading", {"fsdp": 2, "tensor": 2}, ZERO)]
MORE_MIXED = [
    Case("fading", {"tensor": 4}, {"residual": "feature"}),
    Case("fading", {"pipe": 2, "tensor": 2}, STAGES),
    Case("fading", {"fsdp": 2, "tensor": 4}, {"zero": 2, "residual": "sequence", "overlap": "ring"}, "full"),
    Case("fading int8", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature"}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named(MIXED, MORE_MIXED))
def test_a_mixer_of_ones_own_is_split_like_any(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


ARRANGED = [Case("rezero", {"fsdp": 2, "tensor": 2}, ZERO | {"residual": "sequence"})]
MORE_ARRANGED = [
    Case("rezero", {"fsdp": 2, "context": 2, "tensor": 2}, ZERO | {"residual": "sequence", "overlap": "ring"}),
    Case("rezero", {"fsdp": 2, "expert": 2, "tensor": 2}, ZERO | {"residual": "feature"}),
    Case("rezero", {"context": 2, "tensor": 2}, {"residual": "sequence", "overlap": "ring"}),
    Case("rezero", {"pipe": 2, "tensor": 2}, STAGES),
    Case("rezero", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "microbatches": 2}, "full"),
    Case("rezero", {"replica": 2, "tensor": 4}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named(ARRANGED, MORE_ARRANGED))
def test_an_arrangement_of_ones_own_is_split_like_any(case):
    want = of_one_device(case)
    assert all(jnp.any(layer.amount) for layer in want.gradients.stacks[0].blocks.blocks)
    assert differences(of_plan(case), want, ROUNDING) == {}


@pytest.mark.grid
def test_the_gradient_of_an_arrangements_number_is_of_all_tokens(monkeypatch):
    """Without the sum over the axis each device would have that of its own tokens."""
    case = Case("rezero", {"context": 2})
    want = of_one_device(case)
    control.without("gradients over replica", control.of_first)(monkeypatch)
    found = differences(afresh(case), want, ROUNDING)
    assert max(size for path, size in found.items() if path.endswith("amount")) > 1e-3


WHOLE = [Case("whole fading", {"fsdp": 2, "tensor": 2}, ZERO | {"residual": "feature"})]
MORE_WHOLE = [
    Case("whole fading", {"tensor": 4}, {"residual": "feature"}),
    Case("whole fading", {"fsdp": 2, "tensor": 2}, ZERO),
    Case("whole fading", {"pipe": 2, "tensor": 2}, STAGES),
    Case("whole fading", {"fsdp": 2, "tensor": 4}, {"zero": 2, "residual": "sequence"}, "full"),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named(WHOLE, MORE_WHOLE))
def test_a_mixer_that_says_nothing_is_whole_on_every_device(case):
    """Though the names of its dims are split: its arrays are gathered for it. On one device it is as the other."""
    assert differences(of_plan(case), of_one_device(case._replace(model="fading")), ROUNDING) == {}


def test_what_is_whole_is_told_and_its_cache_is_not_split():
    model, path = model_of("whole fading"), "stacks[0].blocks.blocks[0].sublayers[0].layer"
    assert [found for found, _ in replicated_layers(model)] == [path] and not replicated_layers(model_of("fading"))
    (line,) = report.replicated_lines(Case("whole fading", {"tensor": 2}).plan, model)
    assert line.split(": ")[-1] == path
    assert report.replicated_lines(Case("fading", {"tensor": 2}).plan, model_of("fading")) == []
    with pytest.raises(ValueError, match=r"sublayers\[0\].layer declare no heads to split, but its cache has"):
        ShardedModel(model, Case("whole fading", {"tensor": 2}).plan)


@pytest.mark.grid
def test_a_whole_mixer_counts_once(monkeypatch):
    no_part = lambda y, axis, dim: take_local_slice(y, axis, dim) * jnp.zeros((), y.dtype)
    monkeypatch.setattr(_stream, "take_local_slice", no_part)
    want = float(of_one_device(WHOLE[0]._replace(model="fading")).total)
    assert total_of_plan(WHOLE[0]) != pytest.approx(want, rel=1e-3)


@pytest.mark.grid
def test_a_mixer_in_slices_needs_its_sum(monkeypatch):
    control.without("row-parallel output", control.of_first)(monkeypatch)
    assert is_seen(Case("fading", {"tensor": 2}))


@pytest.mark.grid
def test_text_with_a_cache_of_ones_own():
    """Over heads and stages, and rows."""
    model = model_of("fading")
    options = {"max_new_tokens": 8, "log_probabilities": True, "key": KEY}
    write = lambda model: generation.generate(model, [[3, 5, 7, 9], [4], [1, 2]], **options)
    plan = Case("fading", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"microbatches": 2}).plan
    cut, alone = write(ShardedModel(place(model, plan), plan)), write(model)
    assert np.array_equal(cut.ids, alone.ids)
    np.testing.assert_allclose(cut.log_probabilities, alone.log_probabilities, atol=2e-5)  # type: ignore
    state = ShardedModel(model, plan).init_cache(4, 16)[0][0].state
    assert state.shape == (4, 4, 8, 6) and state.addressable_shards[0].data.shape == (2, 2, 4, 6)


def test_a_mixer_of_ones_own_is_counted():
    """Three operations a channel beside those of its maps, in four layers."""
    model = model_of("fading")
    mixer = lambda model: model.stacks[0].blocks.blocks[0].mixer.layer
    silent = eqx.tree_at(mixer, model, SilentMixer(mixer(model)))
    count = functools.partial(planning.flops_per_token, seq=16, backward=False)
    assert count(model) - count(silent) == 4 * 3 * 8 * 6
