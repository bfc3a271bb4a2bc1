"""A user's loss over pairs of rows (`docs/extending.md`) equals one device's over every axis."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plan_controls as control
import pytest
from extending import beside
from narrow_sums import narrow_sums
from plan_models import batch_of, model_of, plan_over
from plan_parity import alone, Case, differences, hastily, leaf_differences, place, total_under, under
from test_narrow_sums import MEANT_OF_NARROW, not_meant, program_of

from eqformer import training
from eqformer.parallel import COLLECTIVES
from eqformer.program import bytes_sent, list_transfers, read_hlo
from eqformer.training import loss_count


ROUNDING = 50 * float(np.finfo(np.float32).eps)


@functools.cache
def pairs(model: str, rows: int = 8, group: int = 2) -> Any:
    """A batch of pairs, with a reference that is another model's."""
    batch = batch_of(model_of(model), rows)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} | {"group": group}
    reference = np.random.default_rng(3).normal(30.0, 10.0, rows).astype(np.float32)
    return beside("preference").Pairs(**fields, reference=reference)


def loss(*args, **given):
    """DPO, steep enough that pairs are far from alike."""
    return training.row_loss(functools.partial(beside("preference").preference, beta=0.05))(*args, **given)


@functools.cache
def of_one(model: str) -> Any:
    return alone(model_of(model), pairs(model), loss)


def of_plan(case: Case, batch: Any = None) -> Any:
    batch = pairs(case.model) if batch is None else batch
    return under(case.plan, model_of(case.model, case.remat), batch, loss)


def test_it_is_the_formula():
    """In float64, with all logits at once."""
    with jax.enable_x64(True):
        model = model_of("gpt2", dtypes=("float64", "float64"))
        batch = pairs("gpt2")
        batch = dataclasses.replace(batch, reference=batch.reference.astype("float64"))

        def formula(model):
            logits = model(jnp.asarray(batch.ids), training.batch_tokens(batch))[0]
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch.targets)[..., None], -1)[..., 0]
            gains = jnp.sum(found * batch.weights.astype("float64"), -1) + batch.reference
            return jnp.sum(jnp.log1p(jnp.exp(-0.05 * (gains[::2] - gains[1::2]))))

        total, gradients = eqx.filter_jit(eqx.filter_value_and_grad(formula))(model)
        given = lambda m, b, key: loss(m, b, None, chunk=24)  # which does not divide the tokens, and no dropout
        run = hastily(training.make_gradient_function(given), model, batch, None)
        found, count, of_model = run(model, batch, None)
        assert float(loss_count(count)) == 4 and np.isclose(float(found), float(total), rtol=1e-12)
        assert leaf_differences(of_model, gradients, 1e-10, rounding=1e-12) == {}
        swapped = dataclasses.replace(batch, reference=batch.reference[::-1])
        assert not np.isclose(float(run(model, swapped, None)[0]), float(total), rtol=1e-3)


CASES = [
    Case("llama", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    Case("llama", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
    Case("shared mixture", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature", "microbatches": 2}),
    Case("gpt2", {"context": 4, "tensor": 2}, {"context_method": "gather", "residual": "feature"}, "full"),
    Case("gpt2", {"replica": 2, "context": 2}, {"microbatches": 2}),
    Case("jaxformer", {"context": 2, "tensor": 4}, {"residual": "sequence", "context_method": "heads"}),
    Case("llama", {"pipe": 2, "tensor": 2}, {"schedule": "gpipe", "edges": "spread", "microbatches": 4}),
    Case("llama", {"pipe": 2, "context": 2, "tensor": 2}, {"schedule": "1f1b", "microbatches": 4}),
    Case("llama", {"pipe": 2}, {"schedule": "interleaved", "chunks": 2, "microbatches": 4}),
    Case("shared mixture", {"fsdp": 2, "expert": 2}, {"zero": 3}),
    Case("shared mixture", {"pipe": 2, "fsdp": 2}, {"microbatches": 2}),
    Case("fading", {"fsdp": 4, "tensor": 2}, {"zero": 3, "smallest": 1}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_equal_one_devices(case):
    assert differences(of_plan(case), of_one(case.model), ROUNDING) == {}


@pytest.mark.grid
def test_microbatches_of_one_device_hold_whole_pairs():
    want, model = of_one("llama"), model_of("llama")
    assert differences(alone(model, pairs("llama"), loss, 2), want, ROUNDING) == {}
    batch, run = pairs("llama", group=1), training.make_gradient_function(loss, microbatches=2)
    only = lambda *given: run(*given)[0]
    parted = hastily(only, model, batch, None)(model, batch, None)  # rows 0, 2, 4 and 6, as if 0 and 2 were a pair
    assert float(parted) != pytest.approx(float(want.total), rel=1e-3)


@pytest.mark.grid
def test_rows_need_their_sums(monkeypatch):
    control.without("row sums", control.kept_all)(monkeypatch)
    case = CASES[0]
    found = total_under(case.plan, model_of(case.model), pairs(case.model), loss)
    assert found != pytest.approx(float(of_one(case.model).total), rel=1e-3)


def test_it_adds_up_in_float32():
    """Of a model in 16 bits, over tokens, rows and devices."""
    case = CASES[0]._replace(dtypes=("bfloat16", "bfloat16"))
    assert not_meant(narrow_sums(program_of(case, batch=pairs("llama"), loss=loss)), MEANT_OF_NARROW) == []


@pytest.mark.quick
def test_half_a_group_is_refused():
    case = Case("llama", {"fsdp": 4}, {"microbatches": 2})
    with pytest.raises(
        ValueError, match=r"8 rows do not fall into 4 x 2 equal pieces of whole groups of 2 rows; take a"
    ):
        of_plan(case)
    with pytest.raises(ValueError, match=r"microbatches=8\): the batch of 8 rows .* of whole groups of 2 rows"):
        alone(model_of("llama"), pairs("llama"), loss, 8)


@pytest.mark.grid
def test_nats_of_rows_and_what_is_sent():
    model, batch, plan = model_of("llama"), pairs("llama"), CASES[0].plan
    nats = training.row_nats, lambda model, batch: training.evaluation_sums(model, batch)["nats"]
    want, total = eqx.filter_jit(lambda model, batch: [of_batch(model, batch) for of_batch in nats])(model, batch)
    row_nats, placed = training.make_row_nats(plan), place(model, plan)
    program = row_nats.lower(placed, batch).compile()
    assert np.allclose(program(placed, batch), want, rtol=1e-5)
    assert np.allclose(np.sum(np.asarray(want)), total, rtol=1e-5)
    sent = list_transfers(read_hlo(program.compiled, mesh=plan.mesh))
    rows = [transfer for transfer in sent if transfer.named(COLLECTIVES) == "row sums"]
    assert bytes_sent(rows, axes=("context",)) == bytes_sent(rows) == 4 * 4  # of four rows


@pytest.mark.grid
@pytest.mark.parametrize("case", [case for case in CASES if "pipe" in case.mesh], ids=lambda case: case.name)
def test_nats_of_rows_come_back_in_order_from_pipelines(case):
    model, batch, plan = model_of(case.model), pairs(case.model), case.plan
    row_nats = training.make_row_nats(plan)(place(plan.shard(model), plan), batch)
    assert np.allclose(row_nats, eqx.filter_jit(training.row_nats)(model, batch), rtol=1e-5)
    assert len({*np.asarray(row_nats).tolist()}) == 8


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"context": 2, "tensor": 2}, {"fsdp": 2, "pipe": 2}])
def test_it_trains_as_on_one_device(mesh):
    """Three steps, with a reference computed under the same plan."""
    model, batch, plan = model_of("llama"), pairs("llama"), plan_over(mesh, microbatches=2)
    optimizer = training.optimizer("adamw", model, rate=1e-2, eps=1e-3)
    metrics = []
    for step, its_nats in (
        (training.make_step(loss, optimizer), training.row_nats),
        (training.make_step(loss, optimizer, plan), training.make_row_nats(plan)),
    ):
        state = training.init_state(jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model), optimizer)
        own = dataclasses.replace(batch, reference=np.asarray(its_nats(model, batch)))
        for _ in range(3):
            state, of_step = step(state, own, None)
            metrics.append([float(of_step[name]) for name in ("loss", "grad_norm", "count")])
    assert np.allclose(metrics[:3], metrics[3:], rtol=ROUNDING * 4)
    assert np.isclose(metrics[0][0], np.log(2), rtol=1e-4) and metrics[2][0] < metrics[0][0]
