"""Tables that a loss multiplies in 16 bits are cast once; tables that are read in float32 are not cast."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import devices_for
from haste import put
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eqformer import nn, training
from eqformer.training.losses import _cross_entropy
from eqformer.training.losses._cross_entropy import find_narrower_dtypes


VOCAB, EMBED, TOKENS = 50, 16, 24


def arrays() -> tuple[dict[str, Any], Any, Any]:
    rng = np.random.default_rng(0)
    wide = lambda *shape: put(rng.normal(size=shape), np.float32)
    tables = {"table": wide(VOCAB, EMBED), "bias": wide(VOCAB), "scale": wide(EMBED)}
    return tables, wide(TOKENS, EMBED).astype(jnp.bfloat16), put(rng.integers(0, VOCAB, TOKENS), np.int32)


def logits(tables: dict[str, Any], hidden: Any) -> Any:
    """A norm's scale rounded beside its use in float32, a table read in 16 bits twice, a bias in float32."""
    scaled = (hidden * tables["scale"].astype(hidden.dtype)).astype(jnp.float32) * tables["scale"]
    both = nn.unembed(scaled.astype(hidden.dtype), tables["table"])
    return both + 0.1 * nn.unembed(hidden, tables["table"]) + tables["bias"]


def loss(tables: dict[str, Any], hidden: Any, targets: Any) -> Any:
    unembed = jax.tree_util.Partial(logits, tables)
    return training.cross_entropy(unembed, hidden, targets, jnp.ones(targets.shape), chunk=8)[0]


def nats(tables: dict[str, Any], hidden: Any, targets: Any) -> Any:
    return _cross_entropy.chunked_token_nats(jax.tree_util.Partial(logits, tables), hidden, targets, chunk=8)


def dtypes(call: Any, hidden: Any, tables: list[Any]) -> list[Any]:
    program = jax.make_jaxpr(call)(hidden, *tables).jaxpr
    return find_narrower_dtypes(program, program.invars[1:])


def test_what_is_read_in_16_bits_everywhere_is_known():
    tables, hidden, _ = arrays()
    leaves, structure = jax.tree.flatten(tables)
    call = lambda hidden, *leaves: logits(jax.tree.unflatten(structure, leaves), hidden)
    found = dict(zip(sorted(tables), dtypes(call, hidden, leaves)))
    assert found == {"table": jnp.bfloat16, "bias": None, "scale": None}
    assert dtypes(call, hidden.astype(jnp.float32), leaves) == [None] * 3
    given = lambda hidden, table: (hidden.astype(jnp.float32) @ table.T, table.astype(jnp.float16))
    assert dtypes(given, hidden, [tables["table"]]) == [None]
    assert dtypes(lambda hidden, table: table, hidden, [tables["table"]]) == [None]


@pytest.mark.grid
def test_loss_and_gradients_are_the_same_to_the_bit(monkeypatch):
    tables, hidden, targets = arrays()
    graded = jax.value_and_grad(loss, (0, 1))
    run = lambda: jax.jit(lambda *given: (graded(*given), nats(*given)))(tables, hidden, targets)
    found = jax.tree.leaves((run(), loss(tables, hidden, targets)))
    monkeypatch.setattr(_cross_entropy, "find_narrower_dtypes", lambda program, tables: [None] * len(tables))
    right = jax.tree.leaves((run(), loss(tables, hidden, targets)))
    assert all(np.array_equal(one, other) and one.dtype == other.dtype for one, other in zip(found, right, strict=True))
    monkeypatch.setattr(
        _cross_entropy, "find_narrower_dtypes", lambda program, tables: [np.dtype(jnp.bfloat16)] * len(tables)
    )
    assert not all(map(np.array_equal, jax.tree.leaves(run()), right))  # the control: what is read wide is not cast


def test_gpus_carry_no_wide_table_through_the_loop(monkeypatch):
    mesh = Mesh(np.array(devices_for("h100:8")[:1]), ("one",))
    here = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda size: jax.ShapeDtypeStruct(size, jnp.float32, sharding=here),
        {"table": (512, 64), "bias": (512,), "scale": (64,)},
        is_leaf=lambda x: isinstance(x, tuple),
    )
    rows = [jax.ShapeDtypeStruct(s, d, sharding=here) for s, d in (((64, 64), jnp.bfloat16), ((64,), jnp.int32))]

    def carried(run: Any = jax.grad(loss)) -> int:
        """Float32 arrays of the table's shape that the loop over chunks has."""
        text = jax.jit(lambda *given: run(*given)).lower(shapes, *rows).compile().as_text()
        (loop,) = [line for line in (text or "").splitlines() if " while(" in line]
        return loop.partition(" while(")[0].count("f32[512,64]")

    assert (carried(), carried(nats)) == (1, 0)  # the sum of gradients
    monkeypatch.setattr(_cross_entropy, "find_narrower_dtypes", lambda program, tables: [None] * len(tables))
    assert (carried(), carried(nats)) == (2, 1)
