"""Tables of layers whose rows stay split over `fsdp` give one device's results, and no device holds a whole table."""

import functools
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import write_texts
from haste import put
from jax.sharding import PartitionSpec as P
from plan_blocks import ngrams
from plan_controls import own_part, own_piece, without
from plan_models import batch_of, filled, model_of, of_blocks, plan_over, with_streams
from plan_parity import Case, differences, of_one_device, of_plan, place, program_under
from test_gathered_pieces import equations
from test_narrow_sums import program_of

from eqformer import nn, training
from eqformer._shapes import count_pieces
from eqformer.parallel import _layer_tables, filter_shard_map, make_mesh, ShardedModel, vary
from eqformer.parallel._mesh import TorusSteps
from eqformer.planning import batch_shapes, sent_bytes, sum_by_cause, temporary_bytes
from eqformer.planning._counted_bytes import name_transfers
from eqformer.program import _jaxpr as traced, list_transfers, read_hlo


ROUNDING = 2e-11
ZERO: dict[str, Any] = {"zero": 3, "smallest": 1}
SMALL = Case("n-grams", {"fsdp": 2}, ZERO)
FOUR = Case("n-grams", {"fsdp": 4}, ZERO)
GRID = [
    Case("n-grams", {"fsdp": 2, "tensor": 2}, ZERO),
    Case("n-grams", {"fsdp": 2, "tensor": 2}, {**ZERO, "residual": "sequence"}, "products"),
    Case("n-grams", {"fsdp": 4, "tensor": 2}, {**ZERO, "residual": "feature"}),
    Case("n-grams", {"replica": 2, "fsdp": 2}, {**ZERO, "microbatches": 2}, "full"),
    Case("n-grams", {"fsdp": 2, "pipe": 2}, {**ZERO, "schedule": "1f1b", "microbatches": 2}),
    Case("n-grams", {"fsdp": 2, "pipe": 2, "tensor": 2}, {**ZERO, "schedule": "zb-h1", "microbatches": 2}),
    Case("n-grams", {"fsdp": 2, "pipe": 2}, {**ZERO, "schedule": "gpipe", "microbatches": 2, "edges": "spread"}),
    Case("values by id", {"fsdp": 2, "tensor": 2}, ZERO),
    Case("values by id", {"fsdp": 2, "context": 2}, ZERO),
]


@pytest.fixture
def split(monkeypatch):
    """Keep the rows of all tables of layers split, and look up vectors in several pieces."""
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", 0)
    monkeypatch.setattr(_layer_tables, "EXCHANGED_BYTES", 2**11)


@pytest.mark.grid
@pytest.mark.parametrize("case", [SMALL, *GRID], ids=lambda case: case.name)
def test_gradients_are_those_of_one_device(case, split):
    """In float64, because the gates are roots of scores: the gradients of scores near 0 have large rounding errors."""
    with jax.enable_x64(True):
        case = case._replace(dtypes=("float64", "float64"))
        assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize(
    "dtypes,tolerance", [(("float32", "float32"), 1e-6), (("float32", "bfloat16"), 2**-8)], ids=["float32", "bfloat16"]
)
def test_a_split_table_gives_the_bits_of_a_gathered_table(dtypes, tolerance, monkeypatch):
    """Only the gradient of the table is summed in another order.

    Devices send the gradients of vectors in bfloat16, where a program on one device may keep them in float32.
    """
    case = SMALL._replace(dtypes=dtypes)
    gathered = of_plan(case)
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", 0)
    split = of_plan(case)
    assert differences(split, gathered, 0.0).keys() <= {"stacks[0].blocks.sublayers[0].layer.table.weight"}
    assert differences(split, gathered, tolerance) == {}


@pytest.mark.grid
def test_16_bit_tables_have_float32_gradients(split):
    case = SMALL._replace(dtypes=("bfloat16", "bfloat16"))
    got = of_plan(case)
    assert table_of(got.gradients).dtype == jnp.float32
    assert differences(got, of_one_device(case), 0.05) == {}


ROWS, DIM = 24, 3


def looked_up(dtype: str, sent: str) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Return the vectors and the table's gradient on four devices, and both as numpy computes them in float64."""
    draw = np.random.default_rng(0)
    table, direction = put(draw.normal(size=(ROWS, DIM)), dtype), draw.normal(size=(8, 5, DIM)).astype("float32")
    ids = draw.integers(0, ROWS, (8, 5)).astype("int32")
    ids[0, :3] = -1, ROWS, 2**31 - 1

    def run(rows, ids, direction):
        embedding = eqx.tree_at(lambda t: t.weight, nn.NGramTable(rows=1, dim=1, heads=1, key=jax.random.key(0)), rows)
        look_up = lambda rows: _layer_tables.SplitTable(
            eqx.tree_at(lambda t: t.weight, embedding, rows), sent, TorusSteps()
        )(ids)
        vectors, pull = jax.vjp(look_up, vary(rows, ["fsdp"]))
        return vectors, pull(direction.astype(vectors.dtype))[0]

    mesh, split = make_mesh(fsdp=4, devices=jax.devices()[:4]), P("fsdp")
    mapped = filter_shard_map(run, mesh, (split, split, split), (split, split))
    vectors, gradient = jax.jit(mapped)(table, ids, direction)
    values, wide = np.asarray(table, "float64"), np.asarray(put(direction, dtype), "float64")
    is_in_table, expected = (ids >= 0) & (ids < ROWS), np.zeros((ROWS, DIM))
    expected_vectors = np.where(is_in_table[..., None], values[np.where(is_in_table, ids, 0)], np.nan)
    np.add.at(expected, ids[is_in_table], wide[is_in_table])
    return np.asarray(vectors, "float64"), np.asarray(gradient, "float64"), expected_vectors, expected


@pytest.mark.by_default("float32-float32-5")
@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("dtype,sent", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_vectors_and_gradients_are_those_of_the_whole_table(dtype, sent, pieces, monkeypatch):
    """Vectors are bit for bit those of the table, and NaN outside of it; gradients of such ids are dropped."""
    bytes_per_id = 4 * DIM * np.dtype(dtype).itemsize
    monkeypatch.setattr(_layer_tables, "EXCHANGED_BYTES", 10 // pieces * bytes_per_id)
    assert count_pieces(10, 10 * bytes_per_id, _layer_tables.EXCHANGED_BYTES) == pieces
    vectors, gradient, expected_vectors, expected = looked_up(dtype, sent)
    tolerance = 1e-6 if sent == "float32" else 0.05
    np.testing.assert_allclose(vectors, expected_vectors, rtol=0 if sent == "float32" else 2**-8)
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name,replacement", [("table ids over fsdp", own_piece), ("looked-up vectors over fsdp", own_part)]
)
def test_a_lookup_needs_both_collectives(name, replacement, monkeypatch):
    without(name, replacement)(monkeypatch)
    vectors, gradient, expected_vectors, expected = looked_up("float32", "float32")
    assert not np.allclose(vectors, expected_vectors, atol=1e-2, equal_nan=True)
    assert not np.allclose(gradient, expected, atol=1e-2)


def test_pieces_are_the_fewest_that_fit_and_are_equal():
    for count, bytes_each, pieces in ((12, 5, 1), (12, 12, 3), (12, 60, 12), (7, 20, 7), (2, 120, 2), (0, 1, 1)):
        assert count_pieces(count, count * bytes_each, 60) == pieces


def test_vectors_of_all_devices_tokens_are_not_held_at_once(monkeypatch):
    """At the published size, with 16,384 tokens on each of 8 devices; the control looks up all vectors at once."""
    mesh, split, dims = make_mesh(fsdp=8), P("fsdp"), (16, 128)

    def run(rows, ids, gradients):
        table = nn.NGramTable(rows=1, dim=1, heads=dims[0], key=jax.random.key(0))
        look_up = lambda rows: _layer_tables.SplitTable(
            eqx.tree_at(lambda t: t.weight, table, rows), "bfloat16", TorusSteps()
        )(ids)
        vectors, pull = jax.vjp(look_up, vary(rows, ["fsdp"]))
        return vectors, pull(gradients)[0]

    def held() -> int:
        place = jax.sharding.NamedSharding(mesh, split)
        shapes = ((320_000_000, 128), jnp.float32), ((8, 16_384, 16), jnp.int32), ((8, 16_384, *dims), jnp.float32)
        mapped = jax.jit(filter_shard_map(run, mesh, (split,) * 3, (split, split)))
        inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
        analysis = mapped.lower(*inputs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    own_vectors = 4 * 16_384 * 16 * 128
    assert held() < 5 * own_vectors
    monkeypatch.setattr(_layer_tables, "EXCHANGED_BYTES", 2**40)
    assert held() > 16 * own_vectors


def shapes_in(program: Any) -> set[tuple[int, ...]]:
    """Return the shapes of all arrays that a device computes in a traced program."""
    per_device = traced._without_dead_code(traced._device_jaxprs(program.jaxpr)[0][0])
    avals: list[Any] = [variable.aval for equation in equations(per_device) for variable in equation.outvars]
    return {aval.shape for aval in avals if hasattr(aval, "shape")}


def has_size(shapes: set[tuple[int, ...]], table: Any) -> bool:
    """Return whether one of the shapes has as many elements as one layer's table, or as all layers' tables."""
    return bool({table[0].size, table.size} & {int(np.prod(shape)) for shape in shapes})


def table_of(model: Any) -> Any:
    """Return the stacked tables of a model's layers."""
    return nn.modules(model, nn.NGramTable)[0].weight


def test_no_array_of_a_step_has_a_whole_tables_size(monkeypatch):
    """Tables that are small enough to be gathered are the control."""
    model = model_of("n-grams")
    for limit, is_whole in ((2**30, True), (0, False)):
        monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", limit)
        assert has_size(shapes_in(program_of(FOUR, model, batch_of(model))), table_of(model)) == is_whole


def largest_size(case: Case, smallest_head: int) -> tuple[int, int]:
    """Return the elements of the largest array in a step that is compiled under the case's plan, and of a table."""
    block = functools.partial(ngrams, smallest=smallest_head)
    model = filled(lambda: with_streams(of_blocks(block, depths=(2,))))
    program = program_under(case.plan, model, batch_of(model)).program  # type: ignore[attr-defined]
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes), table_of(model)[0].size


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize("smallest_head", [2_000, 8_000])
def test_no_array_of_a_compiled_step_has_a_whole_tables_size(mesh, smallest_head, monkeypatch):
    """The largest array is a device's part of the tables of both layers, which is half as large as a table."""
    case = Case("n-grams", mesh, ZERO)
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", 0)
    largest, table = largest_size(case, smallest_head)
    assert largest == table // 2
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", 2**30)
    largest, table = largest_size(case, smallest_head)
    assert largest >= table


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"fsdp": 2, "pipe": 2}])
def test_text_is_one_devices(mesh, split):
    model, plan = model_of("n-grams"), plan_over(mesh, **ZERO)
    text, alone = write_texts(ShardedModel(place(model, plan), plan)), write_texts(model)
    assert np.array_equal(text.ids, alone.ids)
    assert np.allclose(text.log_probabilities, alone.log_probabilities, atol=2e-5)


@pytest.mark.grid
@pytest.mark.parametrize("microbatches", [1, 2])
def test_devices_send_the_vectors_that_the_planner_counts(microbatches, split):
    case = Case("n-grams", {"fsdp": 4}, {**ZERO, "microbatches": microbatches})
    model, plan = model_of(case.model), case.plan
    program = program_under(plan, model, batch_of(model)).program  # type: ignore[attr-defined]
    counted = {sent.what: sent.size for sent in name_transfers(list_transfers(read_hlo(program, mesh=plan.mesh)))}
    told = {sent.what: sent.size for sent in sent_bytes(plan, model, rows=8, seq=16)}
    assert counted["looked-up vectors over fsdp"] == told["vectors of split tables"]


def with_small_and_large_tables() -> list[nn.Transformer]:
    """Return the shapes of two models that differ only in the number of rows of their tables."""
    make = lambda smallest: with_streams(of_blocks(functools.partial(ngrams, smallest=smallest), depths=(2,)))
    return [eqx.filter_eval_shape(make, smallest) for smallest in (5_000, 10_000)]


@pytest.mark.parametrize("limit,is_gathered", [(2**30, True), (0, False)])
def test_the_planner_sends_no_split_table(limit, is_gathered, monkeypatch):
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", limit)
    plan = plan_over({"fsdp": 4}, **ZERO)
    small, large = (
        sum_by_cause(sent_bytes(plan, model, rows=8, seq=16))["state"] for model in with_small_and_large_tables()
    )
    assert (large > small) == is_gathered


@pytest.mark.grid
@pytest.mark.parametrize("limit,is_gathered", [(2**30, True), (0, False)])
def test_the_planner_holds_no_gathered_table(limit, is_gathered, monkeypatch):
    """More rows in a split table add only the gradients of a device's rows."""
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", limit)
    plan, (small, large) = plan_over({"fsdp": 4}, **ZERO), with_small_and_large_tables()

    def held_bytes(model: nn.Transformer) -> int:
        state = training.PlannedState(lambda: model, training.optimizer("adamw", model, rate=1e-2), plan)
        return sum(temporary_bytes(state, model, batch_shapes(8, 16), "cuda").held.values())

    gradient = (table_of(large).size - table_of(small).size) // 4 * 4  # float32 of four devices
    # The gradients of one layer are written into the gradients of both layers.
    assert (held_bytes(large) - held_bytes(small) > 1.6 * gradient) == is_gathered
