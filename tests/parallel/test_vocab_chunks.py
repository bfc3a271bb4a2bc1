"""Embedding tables that are gathered chunk by chunk give the results of a whole table, which no device holds."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from narrow_sums import narrow_sums
from plan_models import batch_of, FAMILIES, filled, model_of
from plan_parity import Case, differences, of_one_device, of_plan
from test_gathered_pieces import equations
from test_narrow_sums import MEANT, MEANT_OF_NARROW, not_meant, program_of

from eqformer import models, nn, training
from eqformer.parallel import _placement, _vocab_chunks, filter_shard_map, make_mesh, vary
from eqformer.parallel._mesh import TorusSteps
from eqformer.program import _jaxpr as traced


ROUNDING = 64 * float(np.finfo(np.float32).eps)
VOCAB, EMBED = 48, 8


def looked_up(dim, parts, dtypes, table, ids, wanted):
    """Vectors and the table's gradient, of four devices."""
    parameters, sent = dtypes

    def one(table, ids, wanted):
        place = vary(jnp.zeros(table.shape, "float32"), ["fsdp"]) if parameters != "float32" else table
        value = table if parameters != "float32" else None

        def lookup_rows(place):
            rows = -(-len(table) // parts)
            return _vocab_chunks.ShardedTable(place, value, dim, sent, rows, TorusSteps()).lookup_rows(ids)

        x, pull = jax.vjp(lookup_rows, place)
        return x, pull(wanted.astype(x.dtype))[0]

    spec = P(*(None,) * dim, "fsdp")
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    mapped = filter_shard_map(one, mesh, (spec, P("fsdp"), P("fsdp")), (P("fsdp"), spec))
    return jax.jit(mapped)(table.astype(parameters), ids, wanted)


@pytest.mark.by_default("dtypes0-1-7", "dtypes1-0-5")
@pytest.mark.parametrize("dim,parts", [(0, 5), (1, 7)])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_vectors_and_gradients_are_those_of_the_whole_table(dim, parts, dtypes):
    """Also where parts do not divide its rows; of an id outside the table NaN, and no gradient."""
    draw = np.random.default_rng(0)
    table, wanted = (
        draw.normal(size=(VOCAB, EMBED)).astype("float32"),
        draw.normal(size=(8, 6, EMBED)).astype("float32"),
    )
    ids = draw.integers(0, VOCAB, (8, 6))
    ids[0, :3] = -1, VOCAB, 10**6
    got, gradient = looked_up(dim, parts, dtypes, jnp.asarray(table), ids, wanted)
    values, direction = (np.asarray(jnp.asarray(x).astype(dtypes[0]), "float64") for x in (table, wanted))
    expected, is_there = np.zeros((VOCAB, EMBED)), (ids >= 0) & (ids < VOCAB)
    np.add.at(expected, ids[is_there], direction[is_there])
    assert np.isnan(np.asarray(got, "float64")[~is_there]).all()
    assert np.array_equal(np.asarray(got, "float64")[is_there], values[ids[is_there]])
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
    shifted = np.roll(expected, 1, axis=0)  # the control: rows of other places
    assert not np.allclose(gradient, shifted, atol=1e-2)


CASES = Case("llama", {"fsdp": 8}, {"zero": 3}), Case("tied", {"fsdp": 4, "context": 2}, {"zero": 3, "microbatches": 2})
VECTORS = Case("vectors of layers", {"fsdp": 4}, {"zero": 3})


@pytest.fixture
def small_parts(monkeypatch):
    """Parts so small that tables of tests have several, the last one not full."""
    for name, size in (("CHUNK_BYTES", 1100), ("WHOLE_HEAD_BYTES", 0), ("WHOLE_TIED_BYTES", 0)):
        monkeypatch.setattr(_vocab_chunks, name, size)


@pytest.mark.grid
@pytest.mark.parametrize("case", [*CASES, VECTORS], ids=lambda case: case.name)
def test_a_plan_whose_tables_are_in_parts_has_one_devices_gradients(case, small_parts):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_evaluation_has_all_logits(case, small_parts):
    """Which ask for the whole table: the same sums as with it."""
    model = model_of(case.model)
    batch = batch_of(model, *case.shape)
    sums = training.make_evaluation(case.plan)(model, batch)
    expected = eqx.filter_jit(training.evaluation_sums)(model, batch)
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5)


@pytest.mark.grid
def test_a_part_that_is_left_out_is_seen(small_parts, monkeypatch):
    """The control: of the logits' parts the last is left out."""
    parts = _vocab_chunks.ShardedTable.parts
    monkeypatch.setattr(_vocab_chunks.ShardedTable, "parts", lambda table: jax.tree.map(lambda x: x[:-1], parts(table)))
    assert "head.weight" in differences(of_plan(CASES[0]), of_one_device(CASES[0]), ROUNDING)


@pytest.mark.parametrize(
    "family,parameters,meant",
    [  # with a head of its own; on the grid without, too
        ("llama", "float32", MEANT),
        pytest.param("jaxformer", "bfloat16", MEANT_OF_NARROW, marks=pytest.mark.grid),
        pytest.param("llama", "bfloat16", MEANT_OF_NARROW, marks=pytest.mark.grid),
        pytest.param("jaxformer", "float32", MEANT, marks=pytest.mark.grid),
    ],
)
def test_no_table_is_whole_and_sums_are_wide(family, parameters, meant, monkeypatch):
    case = Case(family, {"fsdp": 8}, {"zero": 3})
    config = dataclasses.replace(FAMILIES[family], vocab=56)  # of which nothing else has as many
    build = lambda: nn.Precision(parameters, "bfloat16").apply(models.build(config, key=jax.random.key(0)))
    model = filled(build)
    table = model.embedding.weight
    for size, is_whole in ((table.size * 4, True), (table.size * 4 // 3, False)):
        for name, least in (("CHUNK_BYTES", size), ("WHOLE_HEAD_BYTES", size), ("WHOLE_TIED_BYTES", size)):
            monkeypatch.setattr(_vocab_chunks, name, least)
        program = program_of(case, model, batch_of(model))
        assert not_meant(narrow_sums(program), meant) == []
        assert (table.shape in shapes_in(program)) == is_whole


def shapes_in(program):
    """What a device makes, without what nothing asks for: the whole table, of which a loss does not."""
    per_device = traced._without_dead_code(traced._device_jaxprs(program.jaxpr)[0][0])
    avals: list[Any] = [each.aval for equation in equations(per_device) for each in equation.outvars]
    return {aval.shape for aval in avals if hasattr(aval, "shape")}


@pytest.mark.grid
def test_no_table_of_vectors_for_layers_is_whole(monkeypatch):
    """Of layers that are all alike, as no layer reads another's keys here."""
    alike = {"layers": 3, "window_layers": (0, 1, 2), "reading_layers": 0, "widens_reading": False}
    config = dataclasses.replace(FAMILIES[VECTORS.model], vocab=56, input_vocab=56, **alike)
    model = filled(lambda: models.build(config, key=jax.random.key(0)))
    table = model.layer_inputs.embedding.weight
    for size, is_whole in ((table.size * 4, True), (table.size * 4 // 3, False)):
        monkeypatch.setattr(_vocab_chunks, "CHUNK_BYTES", size)
        made = shapes_in(program_of(VECTORS, model, batch_of(model)))
        assert bool({table.shape, (56, table.size // 56)} & made) == is_whole


def test_tables_cross_in_the_compute_dtype_where_nothing_is_computed_before_they_are_cast():
    """Vectors of tokens that are scaled first, positions and biases cross as they are, like a router."""
    for name, narrow in (
        ("llama", {"embedding.weight", "head.weight"}),
        ("gpt2", {"embedding.weight"}),
        ("mixture", {"head.weight"}),
    ):
        model = model_of(name, dtypes=("float32", "bfloat16"))
        plan = Case(name, {"fsdp": 2}, {"zero": 3, "smallest": 1}).plan
        outside = eqx.tree_at(lambda m: m.stacks, plan.leaves(model), ())
        leaves = jax.tree_util.tree_leaves_with_path(outside, is_leaf=lambda node: isinstance(node, _placement.Leaf))
        found = {nn.path_name(path) for path, leaf in leaves if leaf.gather_dtype == "bfloat16"}
        assert found == narrow and all(leaf.dtype in ("float32", "") for _, leaf in leaves)


def test_parts_of_many_rows_have_whole_tiles():
    """And no part has a sixteenth more than it would have."""
    round_to_tiles = _vocab_chunks.round_to_tiles
    assert [round_to_tiles(rows, 4096) for rows in (31, 255, 256, 1002, 2004)] == [31, 255, 256, 1008, 2016]
    assert [round_to_tiles(rows, 2880) for rows in (2000, 2793)] == [2000, 2816]
