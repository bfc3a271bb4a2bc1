"""Choices sent by ragged all-to-alls, as TPUs and GPUs do: one device's loss and gradients, however uneven the load.

CPUs have no such collective; `emulated_ragged.py` replaces it.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import devices_for
from emulated_ragged import as_on_accelerators, ragged_all_to_all
from jax.sharding import NamedSharding, PartitionSpec as P
from plan_controls import kept_all, without
from plan_models import batch_of, model_of
from plan_parity import alone, Case, differences, program_under, total_under
from test_exchange import CASES, crowded

from eqformer import nn, planning
from eqformer.parallel import _collectives, _expert_exchange, Exchange, filter_shard_map, make_mesh, Plan
from eqformer.parallel._expert_parallel import SplitMixture
from eqformer.program import list_transfers, read_hlo


EXPERTS, TOP_K, TOKENS, DEVICES, EMBED = 8, 2, 8, 4, 128  # a row is whole tiles of a TPU's
LOADS = {
    "even": np.zeros(EXPERTS),
    "one device's": np.where(np.arange(EXPERTS) >= EXPERTS - 2, 9.0, 0.0),
    "one expert's, and others": np.where(np.arange(EXPERTS) == 2, 9.0, 0.0),
}


@pytest.mark.quick
def test_the_collective_in_its_place_does_what_the_documentation_says():
    """Its example, of two devices; a device that says that it gets other rows than it is sent gets no numbers."""
    given = [[1, 2, 2], [3, 4, 0]], [[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]]
    wrong = [[1, 1], [1, 1]]

    def run(operand: Any, *runs: Any) -> Any:
        output = jnp.zeros_like(operand, shape=(4, 1))
        return ragged_all_to_all(operand[0][:, None], output, *(each[0] for each in runs), axis_name="expert")

    mesh = make_mesh(expert=2, devices=jax.devices()[:2])
    mapped = jax.jit(filter_shard_map(run, mesh, (P("expert"),) * 5, P("expert")))
    rows, *runs = (jnp.array(each, jnp.float32 if n == 0 else jnp.int32) for n, each in enumerate(given))
    np.testing.assert_array_equal(np.reshape(mapped(rows, *runs), (2, 4)), [[1, 3, 0, 0], [2, 2, 4, 0]])
    assert np.isnan(mapped(rows, *runs[:3], jnp.array(wrong))).reshape(2, 4).all(axis=1).tolist() == [False, True]


@pytest.mark.quick
@pytest.mark.parametrize("room", [3, 7, 100])
def test_every_choice_is_sent_once_to_a_place_of_its_own_beside_those_for_its_expert(room):
    """By going through the rounds one by one; with another order of the senders, rows of one would lie on another's."""
    counts = np.random.default_rng(room).integers(0, 4, (3, 3, 2))
    counts[1, :, 0] = 0
    rounds = -(-counts.sum(axis=(0, 2)).max() // room)
    starts = np.cumsum(counts.reshape(3, -1), axis=1) - counts.reshape(3, -1)
    sent, of = np.zeros_like(counts), jax.jit(_expert_exchange.ragged_runs, static_argnums=3)
    for number in range(rounds):
        runs = [of(jnp.array(counts), device, number * room, room) for device in range(3)]
        for device in range(3):
            taken: list[tuple[int, int, int]] = []  # each row's expert, who sends it, and where it is sent from
            places: list[int] = []
            for other in range(3):
                sending, returning = runs[other][0], runs[device][1]
                for expert in range(2):
                    run, reverse_run = device * 2 + expert, other * 2 + expert
                    start, size, target = int(sending.start[run]), int(sending.size[run]), int(sending.target[run])
                    assert (
                        int(returning.target[reverse_run]),
                        int(returning.size[reverse_run]),
                        int(returning.start[reverse_run]),
                    ) == (start, size, target)
                    assert int(runs[device][0].received[reverse_run]) == size == int(runs[other][1].received[run])
                    if size:
                        assert start == starts[other, run] + sent[other, device, expert]
                    sent[other, device, expert] += size
                    places += range(target, target + size)
                    taken += [(expert, other, start + n) for n in range(size)]
            assert sorted(places) == list(range(len(places))) and len(places) <= room
            assert [taken[places.index(n)] for n in range(len(places))] == sorted(taken)
            assert np.bincount([expert for expert, *_ in taken], minlength=2).tolist() == runs[device][2].tolist()
    np.testing.assert_array_equal(sent, counts)


def layer(bias: np.ndarray, weighs_inputs: bool, dtype: Any) -> tuple[nn.MoE, Any, Any]:
    """A mixture whose selection bias decides who is chosen, tokens, and a gradient of its output."""
    router = nn.TopKRouter(
        embed=EMBED, experts=EXPERTS, top_k=TOP_K, score="sigmoid", balanced=True, key=jax.random.key(0)
    )
    experts = nn.Experts(lambda key: nn.MLP(embed=EMBED, mlp=16, key=key), EXPERTS, key=jax.random.key(1))
    moe = nn.MoE(router, experts, weighs_inputs=weighs_inputs)
    moe = eqx.tree_at(lambda m: m.router.selection_bias, moe, jnp.array(bias))
    wide = lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(wide, (moe, *jax.random.normal(jax.random.key(2), (2, DEVICES, TOKENS, EMBED))))


def index_layer(bias: np.ndarray, factor: float, *, weighs_inputs: bool = False, devices: Any = None) -> Any:
    """Its output and gradients, split over devices and on one; with absent `devices`, its program for these."""
    moe, x, gradient = layer(bias, weighs_inputs, jnp.float32 if devices else jnp.float64)
    arrays, rest = eqx.partition(moe, eqx.is_inexact_array)
    specs, rows = jax.tree.map(lambda x: P("expert") if x.ndim == 3 else P(), arrays), P("expert")
    exchange = Exchange(is_ragged=True, factor=factor)
    split = lambda arrays, x: SplitMixture(eqx.combine(arrays, rest), "exchange", exchange, None)(x)[0]
    mesh = make_mesh(expert=DEVICES, devices=(devices or jax.devices())[:DEVICES])
    plain = lambda arrays, x: eqx.combine(arrays, rest)(x)[0]

    def each(function: Any, *given: Any) -> Any:
        y, pull = jax.vjp(function, *given)
        return y, pull(gradient)

    mapped = filter_shard_map(split, mesh, (specs, rows), rows)
    if devices:
        placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        shapes, gradient = jax.tree.map(placed, (arrays, x), (specs, rows)), np.asarray(gradient)
        return jax.jit(lambda *given: each(mapped, *given)).lower(*shapes).compile()
    return jax.jit(lambda *given: [each(function, *given) for function in (mapped, plain)])(arrays, x)


def max_difference(found: Any) -> float:
    """How far the first of two trees is from the second, at most."""
    return max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, found), strict=True))


@pytest.mark.grid
@pytest.mark.parametrize(
    "load", [pytest.param(name, marks=[pytest.mark.grid] * (name != "one device's")) for name in LOADS]
)
@pytest.mark.parametrize("weighs_inputs", [pytest.param(False, marks=pytest.mark.grid), True])
def test_a_layer_is_one_devices_whatever_its_load(load, weighs_inputs, monkeypatch):
    as_on_accelerators(monkeypatch)
    with jax.enable_x64(True):
        assert max_difference(index_layer(LOADS[load], 1.25, weighs_inputs=weighs_inputs)) < 1e-10


def over_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on TPUs, into arrays that nobody wrote."""
    monkeypatch.setattr(_collectives, "_ragged_into_zeros", _collectives._ragged_into_empty)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.mark.grid
def test_what_nobody_wrote_is_never_read(monkeypatch):
    """The control: where all rows are taken for some that came, there are no numbers."""
    as_on_accelerators(monkeypatch)
    over_no_numbers(monkeypatch)
    with jax.enable_x64(True):
        assert max_difference(index_layer(LOADS["one device's"], 1.25)) < 1e-10
        monkeypatch.setattr(jnp, "any", lambda x, axis: jnp.ones(x.shape[0], bool))
        assert np.isnan(max_difference(index_layer(LOADS["one device's"], 1.25)))


def first_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room in the first round is dropped."""
    make_queues = _expert_exchange.make_ragged_queues
    alone = lambda *args: (found := make_queues(*args))._replace(rounds=jnp.ones_like(found.rounds))
    monkeypatch.setattr(_expert_exchange, "make_ragged_queues", alone)


def wrong_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are sent as rows are, and not back."""
    ragged_runs = _expert_exchange.ragged_runs
    reversed_runs = lambda *args: (ragged_runs(*args)[0],) * 2 + ragged_runs(*args)[2:]
    monkeypatch.setattr(_expert_exchange, "ragged_runs", reversed_runs)


CONTROLS = {
    "further rounds": first_round_alone,
    "the way back": wrong_way_back,
    "whose counts": without("tokens per expert", lambda x, over, **_: jnp.roll(jax.lax.all_gather(x, over), 1, axis=0)),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name != "whose counts")) for name in CONTROLS]
)
def test_without_a_part_it_is_not(name, monkeypatch):
    as_on_accelerators(monkeypatch)
    CONTROLS[name](monkeypatch)
    with jax.enable_x64(True):
        assert not max_difference(index_layer(LOADS["one expert's, and others"], 1.25)) < 1e-2  # it may be no number


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_are_one_devices(case, monkeypatch):
    """Compiled in haste, XLA's exponentials are right to 1e-8. With a single round it is another loss."""
    as_on_accelerators(monkeypatch)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        model = crowded(case.model, case.remat)
        batch = batch_of(model)
        want = alone(model, batch)
        assert differences(program_under(case.plan, model, batch)(model), want, 1e-7) == {}
        first_round_alone(monkeypatch)
        assert total_under(case.plan, model, batch) != pytest.approx(float(want.total), rel=1e-4)


SENT = Case("mixture", {"expert": 2}, {"expert_method": "exchange"})


@pytest.mark.grid
@pytest.mark.parametrize("name", ["expert dispatch", "expert combine"])
def test_each_way_is_needed(name, monkeypatch):
    as_on_accelerators(monkeypatch)
    model = model_of("mixture")
    batch = batch_of(model)
    kept = lambda x, axis, *, received, **_: kept_all(jnp.resize(x, (received, *x.shape[1:])))
    total = total_under(SENT.plan, model, batch)
    without(name, kept)(monkeypatch)
    assert total_under(SENT.plan, model, batch) != pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("name", ["v5e:2x2", "h100:4"])
def test_the_compilers_for_accelerators_make_ragged_all_to_alls(name):
    """One each way, in both passes of the first round, and none that are padded; XLA may make several zeros one."""
    program = index_layer(LOADS["even"], 1.25, devices=devices_for(name))
    sent = [
        transfer
        for transfer in list_transfers(read_hlo(program))
        if transfer.kind == "ragged-all-to-all" and transfer.times
    ]
    assert len(sent) == 4 and all(transfer.named({"expert dispatch", "expert combine"}) for transfer in sent)
    choices, row = TOKENS * TOP_K, EMBED * 4
    assert {transfer.sent for transfer in sent} == {(DEVICES - 1) / DEVICES * choices * row}
    assert not any(
        transfer.kind == "all-to-all" and transfer.sent > row * 4 for transfer in list_transfers(read_hlo(program))
    )


def test_a_plan_exchanges_as_its_platform_does():
    """By padded all-to-alls on CPUs, with more room for pairs of devices, whose loads differ more."""
    plan = Plan(make_mesh(expert=8))
    on = {name: planning.for_platform(plan, name) for name in ("cuda", "tpu")}
    assert plan.exchange == Exchange(False, 2.0) and plan.platform == "cpu"
    assert [its.exchange for its in on.values()] == [Exchange(True, 1.25)] * 2
    assert [its.platform for its in on.values()] == ["gpu", "tpu"]
    assert planning.for_platform(on["tpu"], "tpu") is on["tpu"]
    assert Exchange(True, 1.25).count_slots(64, 8) == 80 and Exchange(False, 1.25).count_slots(64, 8) == 10
    assert Exchange(True, 1.25).count_sent(64, 8) == 64 and Exchange(False, 1.25).count_sent(64, 8) == 80
    assert Exchange(True, 0.5).count_sent(64, 8) == 32 and Exchange(True, 100.0).count_slots(64, 8) == 8 * 64
