"""Forecasts of a step's seconds against counts by hand."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import pytest

from eqformer import nn
from eqformer.kernels.grouped_matmul import _hopper_fp8
from eqformer.models import build, LlamaConfig, MixtralConfig
from eqformer.parallel import Plan
from eqformer.planning import (
    abstract_mesh,
    enumerate_meshes,
    flops_per_token,
    fp8_flops_per_token,
    parameter_count,
    roofline,
    sent_bytes,
    topology,
    visible_keys,
)


NUMBERS = LlamaConfig(vocab=128, embed=32, layers=4, heads=4, kv_heads=4, mlp=64)
ROWS, SEQ = 16, 64


def shapes_of(numbers: Any = NUMBERS):
    return eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))


def time_of(plan, model, chips="v5e:2x4", bytes_factor=1.0, **on_host):
    sent = [each._replace(size=bytes_factor * each.size) for each in sent_bytes(plan, model, rows=ROWS, seq=SEQ)]
    return roofline(plan, model, sent, topology(chips), rows=ROWS, seq=SEQ, **on_host)


@pytest.mark.quick
def test_products_run_at_the_peak_and_state_is_sent_beside_them():
    model, plan = shapes_of(), Plan(abstract_mesh({"fsdp": 8}), zero=3)
    time, one = time_of(plan, model), topology("v5e:2x4").accelerator
    operations = flops_per_token(model, SEQ) * ROWS * SEQ / 8
    assert time.products == time.of_model == operations / one.bf16
    assert time.sent == {"state": sum(each.size for each in sent_bytes(plan, model, rows=ROWS, seq=SEQ)) / one.link / 2}
    assert time.utilization == time.products / time.seconds
    slow = time_of(plan, model, bytes_factor=1e6)
    assert slow.seconds == pytest.approx(slow.sent["state"]) and slow.bound == "state"
    again = time_of(plan, nn.with_execution(model, remat="full"))
    assert again.products == pytest.approx(time.products * 4 / 3) and again.of_model == time.of_model


def test_tpus_wait_for_gradients_and_gpus_for_nothing_of_state():
    model, plan = shapes_of(), Plan(abstract_mesh({"fsdp": 8}), zero=3)
    on_tpus, on_gpus = time_of(plan, model), time_of(plan, model, "h100:8")
    gradients = 7 / 8 * 4 * parameter_count(model)
    own = gradients / topology("v5e:2x4").accelerator.link / 2
    assert on_tpus.exposed_state == pytest.approx(own, rel=0.01)  # vectors of norms have copies
    assert on_gpus.exposed_state == 0
    for time in (on_tpus, on_gpus):
        beside = max(time.products, time.memory, time.sent["state"] - time.exposed_state)
        assert time.seconds == pytest.approx(beside + time.exposed_state)
    assert time_of(Plan(abstract_mesh({"tensor": 4, "fsdp": 2}), zero=0), model).exposed_state > 0


def test_products_of_8_bits_run_at_their_own_peak():
    """Of the stacks' maps, three passes of two operations a number, or two where weights are not trained."""
    model, plan = shapes_of(), Plan(abstract_mesh({"fsdp": 16}), zero=3)
    fp8 = eqx.filter_eval_shape(lambda: nn.with_fp8(build(NUMBERS, key=jax.random.key(0))))
    narrow = 6 * 4 * (4 * 32 * 32 + 3 * 32 * 64)
    assert fp8_flops_per_token(fp8) == narrow and fp8_flops_per_token(model) == 0
    assert fp8_flops_per_token(fp8, trained=lambda model: ()) == narrow * 2 / 3
    for chips, faster in (("tpu7x:2x2x2", True), ("v5p:2x2x4", False)):
        one, times = topology(chips).accelerator, [time_of(plan, each, chips) for each in (model, fp8)]
        saved = narrow * ROWS * SEQ / 16 * (1 / one.bf16 - 1 / one.fp8)
        assert (
            times[0].products - times[1].products == pytest.approx(saved, rel=1e-9, abs=1e-15) and (saved > 0) == faster
        )


def test_experts_products_of_8_bits_are_counted_where_they_run(monkeypatch):
    """As many as a token takes of them; at the compute dtype's peak where chips have kernels of 16 bits alone."""
    mixture = MixtralConfig(vocab=128, embed=32, layers=4, heads=4, kv_heads=4, mlp=64, experts=8, top_k=2)
    model, plan = shapes_of(mixture), Plan(abstract_mesh({"fsdp": 8}), zero=3)
    fp8 = eqx.filter_eval_shape(lambda: nn.with_fp8(build(mixture, key=jax.random.key(0))))
    attention, experts = 6 * 4 * 4 * 32 * 32, 6 * 4 * 2 * 3 * 32 * 64
    assert fp8_flops_per_token(fp8) == pytest.approx(attention + experts, rel=1e-9)
    assert fp8_flops_per_token(fp8, experts=False) == attention
    saved = lambda chips: time_of(plan, model, chips).products - time_of(plan, fp8, chips).products
    for chips, narrow in (("tpu7x:2x2x1", attention), ("b200:8", attention + experts), ("v6e:2x4", 0)):
        one = topology(chips).accelerator
        assert saved(chips) == pytest.approx(narrow * ROWS * SEQ / 8 * (1 / one.bf16 - 1 / one.fp8), abs=1e-15)
    one = topology("h100:8").accelerator
    for has_kernels, narrow in ((True, attention + experts), (False, attention)):
        monkeypatch.setattr(_hopper_fp8, "has_mixed_formats", lambda found=has_kernels: found)
        assert saved("h100:8") == pytest.approx(narrow * ROWS * SEQ / 8 * (1 / one.bf16 - 1 / one.fp8))


def test_what_is_sent_with_nothing_beside_it_and_bubbles_are_added():
    model = shapes_of()
    plan = Plan(abstract_mesh({"fsdp": 2, "tensor": 4}), zero=3)
    time = time_of(plan, model)
    beside = max(time.products, time.memory, time.sent["state"] - time.exposed_state)
    assert time.seconds == pytest.approx(beside + time.exposed_state + time.sent["tensor"])
    rings = Plan(abstract_mesh({"fsdp": 2, "tensor": 4}), zero=3, residual="sequence", overlap="ring")
    assert "tensor" in time_of(rings, model).hidden
    for microbatches in (1, 2, 4):  # `p + m - 1` turns for the work of m microbatches, here on p = 4 stages
        piped = time_of(Plan(abstract_mesh({"pipe": 4, "fsdp": 2}), microbatches=microbatches), model)
        exposed = piped.exposed_state
        busy = max(piped.products, piped.memory, piped.sent["state"] - exposed) + exposed + piped.sent["pipe"]
        assert piped.bubble == 3 / microbatches
        assert piped.seconds == pytest.approx(busy * (4 + microbatches - 1) / microbatches)


def test_batches_without_tokens_are_refused():
    model, plan, chips = shapes_of(), Plan(abstract_mesh({"fsdp": 8}), zero=3), topology("v5e:2x4")
    for rows, seq, fault in ((0, SEQ, "rows=0"), (ROWS, 0, "seq=0")):
        with pytest.raises(ValueError, match=rf"^roofline\({fault}\): {fault[:-2]} must be at least 1"):
            roofline(plan, model, [], chips, rows=rows, seq=seq)
    for count in (flops_per_token, lambda _, seq: visible_keys(nn.causal(), seq)):
        with pytest.raises(ValueError, match=r"\(seq=0\): seq must be at least 1"):
            count(model, 0)
    assert visible_keys(nn.causal(), 1) == 1


def test_the_link_to_the_host_is_waited_for_where_a_pass_is_shorter():
    """A third of the products is the forward pass; what an update brings and takes back is waited for."""
    model, plan, link = shapes_of(), Plan(abstract_mesh({"fsdp": 8}), zero=0), 1.5e10
    alone = time_of(plan, model, bytes_factor=0)
    busy, own = max(alone.products, alone.memory), alone.products
    moved = time_of(plan, model, bytes_factor=0, moment_bytes=link)
    assert moved.seconds == busy + 2 and moved.by_cause["optimizer state on its host"] == 2
    for share in (0.1, 0.5, 1.0):  # of all products' time: in neither pass, in the forward pass, in both
        kept = time_of(plan, model, bytes_factor=0, kept_bytes=share * own * link)
        products = max(share, 1 / 3) * own + max(share, 2 / 3) * own
        assert kept.seconds == pytest.approx(max(products, kept.memory))
        assert kept.by_cause["kept on its host"] == pytest.approx(2 * share * own)
    far = time_of(plan, model, bytes_factor=0, kept_bytes=link)
    assert far.seconds == pytest.approx(2) and far.bound == "kept on its host"
    assert "kept on its host" not in alone.by_cause and alone.seconds == busy


def test_every_mesh_has_all_devices_and_no_more_stages_than_layers():
    plan = Plan(abstract_mesh({"fsdp": 16}), zero=1, microbatches=8)
    model = shapes_of(dataclasses.replace(NUMBERS, layers=2))
    meshes = list(enumerate_meshes(16, plan, model))
    assert all(mesh.size == 16 and mesh.shape["pipe"] <= 2 and mesh.shape["expert"] == 1 for mesh, _ in meshes)
    assert {mesh.shape["tensor"] for mesh, _ in meshes} == {1, 2, 4, 8} and len(set(meshes)) == len(meshes)
    assert {zero for _, zero in meshes} == {1, 3} and {mesh.shape["replica"] for mesh, _ in meshes} == {1}
    wider = list(enumerate_meshes(16, plan, model, tensor=64, replicas=(1, 4)))
    assert all(mesh.size == 16 for mesh, _ in wider) and set(meshes) < set(wider)
    assert {mesh.shape["tensor"] for mesh, _ in wider} == {1, 2, 4, 8, 16}
    assert {mesh.shape["replica"] for mesh, _ in wider} == {1, 4}
