"""Modules of `docs/extending.md` are laid out, counted, saved and loaded like the package's modules."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plan
import pytest
from extending import beside

from eqformer import generation, models, nn, parallel, planning, training
from eqformer.recipes import _setup


KEY = jax.random.key(0)
VOCAB = beside("trained").VOCAB
LLAMA = models.LlamaConfig(vocab=VOCAB, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)


def of_eight_bits(seed=0):
    return eqx.filter_jit(
        lambda: nn.map_linears(beside("eight_bits").Int8Map.of, models.build(LLAMA, key=jax.random.key(seed)))
    )()


def hybrid(seed=0):
    return eqx.filter_jit(lambda: beside("fading").hybrid(jax.random.key(seed), vocab=VOCAB))()


def macaron(seed=0):
    return eqx.filter_jit(lambda: beside("rezero").macaron(jax.random.key(seed), vocab=VOCAB, amount=0.5))()


@pytest.mark.grid
@pytest.mark.parametrize("make", [hybrid, of_eight_bits, macaron])
def test_a_model_is_saved_under_one_mesh_and_loaded_under_another(make, tmp_path):
    """Bit for bit, and it writes the same text there with its cache."""
    plan = parallel.Plan(parallel.make_mesh(fsdp=2, pipe=2, tensor=2), microbatches=2, zero=3, smallest=1)
    model, where = make(seed=1), lambda plan, model: parallel.shardings(plan.parameter_specs(model), plan.mesh)
    arrays, rest = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jax.device_put(arrays, where(plan, arrays)), rest)
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(model, 1, training.run_metadata(recipe={}, step=1, data={}, key=KEY))
    other = parallel.Plan(parallel.make_mesh(fsdp=4, tensor=2), residual="feature")
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    arrays, rest = eqx.partition(eqx.filter_eval_shape(make), nn.has_shape)
    loaded, _ = training.Checkpointer(tmp_path).restore(
        eqx.combine(jax.tree.map(place, arrays, where(other, arrays)), rest)
    )
    assert all(map(np.array_equal, *map(jax.tree.leaves, (loaded, model))))
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (loaded, make()))))  # the control: of another key
    write = lambda model: generation.generate(model, [[3, 5, 7], [4], [1, 2], [9]], max_new_tokens=5, key=KEY)
    alone = write(make(seed=1))
    assert np.array_equal(write(parallel.ShardedModel(loaded, other)).ids, alone.ids)


@pytest.mark.parametrize(
    "make,paths",
    [
        (hybrid, ["blocks.blocks[0].sublayers[0].layer.keep.weight"]),
        pytest.param(
            of_eight_bits,
            ["blocks.sublayers[0].layer.query.rounded", "blocks.sublayers[0].layer.query.scale"],
            marks=pytest.mark.grid,
        ),
        pytest.param(
            macaron,
            ["blocks.blocks[2].amount", "blocks.blocks[1].sublayer.layer.query.weight"],
            marks=pytest.mark.grid,
        ),
    ],
)
def test_a_layout_has_a_line_for_each_array(make, paths, monkeypatch, capsys):
    monkeypatch.setattr(_setup, "build_model", lambda *_: make())
    plan.main([*"--batch 8 --seq 16 --mesh.fsdp 2 --mesh.tensor 4".split()])
    lines = capsys.readouterr().out.splitlines()
    for path in paths:
        assert any(path in line for line in lines), (path, lines)
    line = next(line for line in lines if paths[0] in line)
    assert "tensor" in line or paths[0].endswith("amount")  # split by the names of its dims
    assert any("layers with a replicated stream" in line for line in lines)


@pytest.mark.quick
def test_what_is_added_to_a_model_is_counted():
    """Numbers of each module, by hand."""
    count = planning.parameter_count
    mixed, mapped, twice = (eqx.filter_eval_shape(make) for make in (hybrid, of_eight_bits, macaron))
    fading = 2 * (32 * 4 * 6 + 4 * 6 + 32 * 4 + 4 * 6 * 32 + 32) + 2 * 32
    plain = eqx.tree_at(lambda m: [s.blocks.blocks[0].mixer for s in m.stacks], mixed, [nn.Residual(jnp.abs)])
    assert count(mixed) - count(plain) == fading
    llama: Any = eqx.filter_eval_shape(lambda: models.build(LLAMA, key=KEY))
    outputs = 2 * (32 + 16 + 16 + 32 + 48 + 48 + 32) + VOCAB
    linears: list[Any] = list(nn.linear_maps(llama))
    weights = sum(linear.weight.size for linear in linears)
    assert count(mapped) == count(llama) - weights + outputs  # what is rounded is not trained
    is_rezero = lambda node: isinstance(node, beside("rezero").ReZero)
    bare = lambda model: jax.tree.map(lambda node: node.sublayer if is_rezero(node) else node, model, is_leaf=is_rezero)
    assert count(twice) - count(bare(twice)) == 2 * 3
    flops = lambda model: planning.flops_per_token(model, 16)
    assert flops(twice) == flops(bare(twice))
