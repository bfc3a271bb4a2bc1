"""Encoder-decoder models over devices: loss and gradients equal one device's; splits of rows and layers are refused."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from narrow_sums import narrow_sums
from plan_models import batch_of, filled, plan_over
from plan_parity import Case, compiled, differences, total_under, under
from test_narrow_sums import MEANT_OF_NARROW, not_meant, program_of

from eqformer import models, nn
from eqformer.nn import _stack
from eqformer.parallel.tensor._tensor import PrecomputedMap
from eqformer.parallel.tensor._vocabulary import EncoderOutput
from eqformer.training import make_gradient_function, next_token_loss


CONFIG = models.T5Config(50, 24, 2, 4, 20, head_dim=6, encoder_layers=3, ranges=8, farthest=10)
MERGED = models.T5Gemma2Config(50, 24, 2, 4, 2, 20, head_dim=6, window_layers=(0, 1), window=4, query_scalar=24)
ROUNDING = 4e-5


@functools.cache
def model_and_pairs() -> tuple[nn.Transformer, Any]:
    """A model, and packed pairs."""
    model = filled(lambda: models.build(CONFIG, key=jax.random.key(0)))
    return model, batch_of(model)


@functools.cache
def of_one_device() -> Any:
    """The loss of the pairs and its gradients."""
    return compiled(make_gradient_function(next_token_loss), *model_and_pairs())


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh, choices",
    [
        ({"fsdp": 2, "tensor": 2}, {"zero": 3, "residual": "sequence"}),
        ({"fsdp": 4}, {"zero": 3, "microbatches": 2}),
        ({"replica": 2, "fsdp": 2}, {"zero": 2}),
        ({"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "replicated"}),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(mesh, choices, monkeypatch):
    (model, batch), want = model_and_pairs(), of_one_device()
    plan = plan_over(mesh, smallest=1, **choices)
    assert differences(under(plan, model, batch), want, ROUNDING) == {}
    table = lambda outcome: outcome.gradients.encoder.score_bias.weight
    assert float(jnp.max(jnp.abs(table(want)))) > 1e-2
    if plan.residual == "sequence":  # each device's own part of the source in the place of all others'
        own = lambda self, x: jnp.concatenate([self.inner(x)] * 2, axis=-2)
        monkeypatch.setattr(EncoderOutput, "__call__", own)
        assert abs(total_under(plan, model, batch) / float(want.total) - 1) > 1e-4


@pytest.mark.parametrize(
    "mesh, choices, cut",
    [
        ({"pipe": 2}, {"microbatches": 2}, "pipe=2"),
        ({"context": 2}, {}, "context=2"),
        ({"tensor": 2}, {"residual": "feature"}, "residual='feature'"),
    ],
)
def test_rows_and_layers_are_not_cut(mesh, choices, cut):
    model, batch = model_and_pairs()
    plan = plan_over(mesh, **choices)
    sublayer = rf"Plan over {cut}: stacks.*sublayers"
    with pytest.raises(ValueError, match=rf"{sublayer}\[0\].layer reads a bias of scores, which such a plan"):
        plan.check(model, rows=len(batch.ids), seq=16)
    bare = jax.tree.map(_unbiased, model, is_leaf=lambda node: isinstance(node, nn.Attention))
    with pytest.raises(ValueError, match=rf"{sublayer}\[1\].layer reads another sequence, which such a plan"):
        plan.check(bare, rows=len(batch.ids), seq=16)
    plan_over({"fsdp": 2, "tensor": 2}).check(model, rows=len(batch.ids), seq=16)


@pytest.mark.grid
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("residual", ["sequence", "replicated"])
def test_a_sources_keys_are_made_by_the_maps_of_the_rows_own(kv_heads, residual, monkeypatch):
    """What the maps give of the stream is known when they are called; what they give of a source is not."""
    config = dataclasses.replace(MERGED, kv_heads=kv_heads)
    model = filled(lambda: models.build(config, key=jax.random.key(0)))
    batch, plan = batch_of(model), plan_over({"fsdp": 2, "tensor": 2}, zero=3, smallest=1, residual=residual)
    want = compiled(make_gradient_function(next_token_loss), model, batch)
    assert differences(under(plan, model, batch), want, ROUNDING) == {}
    if residual == "replicated":
        of_the_row = lambda self, x: jnp.concatenate([self(self.layer_input)] * 2, axis=-3)[..., : x.shape[-2], :, :]
        monkeypatch.setattr(PrecomputedMap, "of_other", of_the_row)
        assert abs(total_under(plan, model, batch) / float(want.total) - 1) > 1e-4
    for axis in ("pipe", "context"):
        sublayer = rf"Plan over {axis}=2: stacks.*sublayers\[0\]"
        with pytest.raises(ValueError, match=rf"{sublayer}.layer reads another sequence, which"):
            plan_over({axis: 2}, microbatches=2).check(model, rows=len(batch.ids), seq=16)


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh, choices",
    [
        ({"fsdp": 2, "tensor": 2}, {"zero": 3, "residual": "sequence"}),
        ({"tensor": 4}, {"residual": "replicated"}),
        ({"replica": 2, "fsdp": 2}, {"zero": 2}),
    ],
)
def test_an_encoder_has_a_table_of_its_own(mesh, choices, monkeypatch):
    """Of other ids and other channels than the decoder's."""
    read = models.Gemma2Config(30, 16, 2, 4, 4, 12, head_dim=4, window_layers=(0,), window=3)
    sizes: dict[str, Any] = {"head_dim": 6, "window_layers": (0, 1), "window": 4, "query_scalar": 24}
    config = models.T5GemmaConfig(50, 24, 2, 4, 4, 20, **sizes, encoder=dataclasses.replace(read, vocab=54))
    model = filled(lambda: models.build(config, key=jax.random.key(0)))
    batch, plan = batch_of(model), plan_over(mesh, smallest=1, **choices)
    want = compiled(make_gradient_function(next_token_loss), model, batch)
    assert differences(under(plan, model, batch), want, ROUNDING) == {}
    assert float(jnp.max(jnp.abs(want.gradients.encoder.embedding.weight))) > 1e-3
    if plan.stream is not None and plan.residual == "replicated":  # each device's own ids alone
        monkeypatch.setattr(type(plan.stream), "reduce", lambda self, name, x: x)
        with pytest.raises((AssertionError, ValueError)):
            assert abs(total_under(plan, model, batch) / float(want.total) - 1) < 1e-4


@pytest.mark.grid
def test_what_layers_share_has_its_gradient_added_up_in_float32(monkeypatch):
    model = nn.Precision(parameters="bfloat16", compute="bfloat16").apply(model_and_pairs()[0])
    found = lambda: not_meant(narrow_sums(program_of(Case("", {}), model)), MEANT_OF_NARROW)
    assert found() == []
    monkeypatch.setattr(_stack, "in_float32", lambda tokens: tokens)
    assert {one.place for one in found()} == {("Stack.__call__", ())}


def _unbiased(node: Any) -> Any:
    """An attention without its bias, or what else it is."""
    if not isinstance(node, nn.Attention):
        return node
    bare = copy.copy(node)
    object.__setattr__(bare, "scores", dataclasses.replace(node.scores, bias=False))
    return bare
