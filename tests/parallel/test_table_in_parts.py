"""Tables of tokens that are looked up part by part: the numbers of a whole table, which is nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from narrow_sums import narrow_sums
from plan_models import model_of
from plan_parity import Case, differences, of_one_device, of_plan
from test_gathered_pieces import equations
from test_narrow_sums import MEANT, MEANT_OF_NARROW, not_meant, program_of

from eqformer.parallel import filter_shard_map, make_mesh, vary
from eqformer.parallel.state import _table


ROUNDING = 64 * float(np.finfo(np.float32).eps)
VOCAB, EMBED = 48, 8


def looked_up(dim, parts, dtypes, table, ids, wanted):
    """Vectors and the table's gradient, of four devices."""
    parameters, sent = dtypes

    def one(table, ids, wanted):
        place = vary(jnp.zeros(table.shape, "float32"), ["fsdp"]) if parameters != "float32" else table
        value = table if parameters != "float32" else None

        def look_up(place):
            embedding = _table.TableInParts(jnp.zeros((1, EMBED)), place, value, None, dim, sent, parts, ())
            return embedding(ids)

        x, pull = jax.vjp(look_up, place)
        return x, pull(wanted.astype(x.dtype))[0]

    spec = P(*(None,) * dim, "fsdp")
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    mapped = filter_shard_map(one, mesh, (spec, P("fsdp"), P("fsdp")), (P("fsdp"), spec))
    return jax.jit(mapped)(table.astype(parameters), ids, wanted)


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


CASE = Case("llama", {"fsdp": 8}, {"zero": 3})


def test_a_plan_whose_table_is_in_parts_has_one_devices_gradients(monkeypatch):
    monkeypatch.setattr(_table, "PART", 256)
    assert differences(of_plan(CASE), of_one_device(CASE), ROUNDING) == {}


@pytest.mark.parametrize("parameters,meant", [("float32", MEANT), ("bfloat16", MEANT_OF_NARROW)])
def test_nothing_is_as_large_as_the_table_and_sums_are_wide(parameters, meant, monkeypatch):
    case = CASE._replace(dtypes=(parameters, "bfloat16"))
    table = model_of(case.model).embedding.weight
    for part, parts in ((table.size * 4, 1), (table.size * 4 // 3, 3)):
        monkeypatch.setattr(_table, "PART", part)
        program = program_of(case)
        assert not_meant(narrow_sums(program), meant) == []
        added = [one.outvars[0].aval for one in equations(program.jaxpr) if one.primitive.name == "scatter-add"]
        assert max(one.size for one in added if one.ndim == 2) * parts == table.size
