"""Layers that read other layers' keys, and per-layer vectors of tokens, equal one device's under plans."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import afresh, named, of_plan, ZERO
from plan_models import FAMILIES, model_of, plan_over
from plan_parity import Case, differences, of_one_device
from test_sharded_model import built, planned, same, written

from eqformer import models, nn
from eqformer.nn import _block, _tokens as _cross_layer
from eqformer.parallel.tensor import _residual_stream as _norms


ROUNDING = 100 * float(np.finfo(np.float32).eps)  # the gradient of a scale is one sum of all that the layer adds
ALL = {"fsdp": 2, "context": 2, "tensor": 2}
SEQUENCE: dict[str, Any] = {"residual": "sequence"}
VECTORS = "vectors of layers"
PIPES: list[dict[str, Any]] = [{"schedule": name, "microbatches": 2} for name in ("gpipe", "zb-h1")]
PIPES += [{"schedule": "gpipe", "microbatches": 2, "edges": "spread"}]
GRID = [
    Case("pairs", {"fsdp": 2, "tensor": 2}, ZERO | SEQUENCE),
    Case(VECTORS, ALL, ZERO | SEQUENCE, "full"),
    Case(VECTORS, {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "replicated", "microbatches": 2}),
    Case(VECTORS, {"fsdp": 2, "tensor": 4}, {"zero": 2, "residual": "feature"}, "products"),
    Case(VECTORS, {"tensor": 2}, SEQUENCE | {"overlap": "ring"}),
    Case(VECTORS, {"context": 4, "tensor": 2}, {"context_method": "gather"}, "products"),
    Case(VECTORS, {"replica": 2, "context": 2}, {"context_method": "heads"}),
    *(Case("pairs", {"pipe": 2, "tensor": 2}, choices | SEQUENCE) for choices in PIPES),
    Case("pairs", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 3, "smallest": 1, "microbatches": 2}),
]


@pytest.mark.parametrize("case", named([], GRID))
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("what", ["keys", "norms"])
def test_what_is_left_out_is_seen(what, monkeypatch):
    """Two negative controls: layers read the keys of other tokens, or norms cover only a device's slice of a vector."""
    case = Case(VECTORS, {"tensor": 2})
    wanted = of_one_device(case)
    if what == "keys":
        moved = lambda left: eqx.tree_at(lambda one: one.value.keys, left, jnp.roll(left.value.keys, 1, 1))
        monkeypatch.setattr(_block, "find_shared", lambda left, name: moved(_cross_layer.find_shared(left, name)))
    else:
        monkeypatch.setattr(_norms.send, "pmean", lambda name, x, axis: x)
    assert differences(afresh(case), wanted, 1e-2)


@pytest.mark.quick
def test_what_stages_would_have_to_send_is_refused():
    plan, model = plan_over({"pipe": 2}, microbatches=2), model_of(VECTORS)
    with pytest.raises(ValueError, match=r"Plan over pipe=2: stacks\[1\] reads keys .*; leave out pipe, and split"):
        plan.check(model, rows=8, seq=16)
    without = eqx.tree_at(lambda m: m.stacks, model, model_of("llama").stacks)
    with pytest.raises(ValueError, match=r"pipe=2: each layer is given a vector of each token \(layer_inputs\), but"):
        plan.check(without, rows=8, seq=16)
    plan.check(model_of("pairs"), rows=8, seq=16)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}, {"context": 2, "tensor": 2}, {"fsdp": 4}])
def test_text_is_one_devices(mesh):
    model = built("gemma4-e-byte-400k")
    assert same(written(planned(model, plan_over(mesh)), 3), written(model, 3))


@pytest.mark.grid
def test_shapes_of_the_family_are_those_of_the_model():
    made = eqx.filter_eval_shape(lambda: models.build(FAMILIES[VECTORS], key=jax.random.key(0)))
    assert [len(stack) for stack in made.stacks] == [1, 2]
    assert nn.dims(made).layer_inputs.embedding.weight == "vocab mlp"
