"""Tables and drawings of a layout agree with the shardings that JAX reports."""

import math
import re
import struct

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqformer import models, nn
from eqformer.parallel import draw_array, layout_table, make_mesh, partition_specs, Plan, plot_layout


LLAMA = models.LlamaConfig(vocab=64, embed=32, layers=4, heads=8, kv_heads=4, mlp=48)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, pipe=2, tensor=2)


def laid_out(mesh):
    shapes = eqx.filter_eval_shape(lambda key: models.build(LLAMA, key=key), jax.random.key(0))
    return shapes, Plan(mesh, zero=3, smallest=64).parameter_specs(shapes)


def read_table(text):
    """Rows of a table by path."""
    lines = text.splitlines()
    assert lines[0].startswith("mesh: ") and set(lines[2]) == {"-"}
    rows = {line.split("  ")[0]: re.split(r"\s{2,}", line) for line in lines[3:-1]}
    return lines[0], rows, lines[-1]


def test_a_table_can_be_read_back(mesh):
    shapes, specs = laid_out(mesh)
    mesh_line, rows, whole = read_table(layout_table(shapes, specs, mesh))
    assert mesh_line == "mesh: fsdp=2 pipe=2 tensor=2, 8 devices"
    total, own, names = 0, 0, jax.tree.leaves(nn.dims(shapes))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    spec_of = dict(zip([path for path, _ in leaves], jax.tree.structure(shapes).flatten_up_to(specs)))
    kept_whole = []
    for (path, leaf), dims in zip(leaves, names):
        if not nn.has_shape(leaf):
            continue
        sharding = NamedSharding(mesh, spec_of[path])
        piece = sharding.shard_shape(leaf.shape)
        name, drawn, shape, its_piece, nbytes, its_bytes = rows.pop(nn.path_name(path))
        assert [part.partition("/")[0] for part in drawn.split()] == dims.split()
        split = [part.partition("/")[2] or None for part in drawn.split()]
        assert P(*split) == spec_of[path]
        assert tuple(map(int, shape.split("x"))) == leaf.shape and tuple(map(int, its_piece.split("x"))) == piece
        assert int(nbytes.replace(",", "")) == 4 * leaf.size
        assert int(its_bytes.replace(",", "")) == 4 * math.prod(piece)
        total, own = total + 4 * leaf.size, own + 4 * math.prod(piece)
        kept_whole += [name] if sharding.is_fully_replicated else []
    assert [cell.replace(",", "") for cell in rows.pop("total")[1:]] == [f"{own / total:.1%}", str(total), str(own)]
    assert rows == {} and kept_whole == ["norm.weight"]
    assert whole == "replicated on every device (128 bytes): norm.weight"


def test_a_table_of_one_device_and_of_values():
    mesh = make_mesh(devices=jax.devices()[:1])
    model = nn.Linear("embed -> mlp", embed=4, mlp=4, bias=True, key=jax.random.key(0))
    tree = {"linear": model, "text": "kept", "key": jax.random.key(0)}
    text = layout_table(tree, partition_specs(tree, Plan(mesh).layout(splits_fsdp=False), mesh), mesh)
    assert "mesh: 1 device\n" in text and "scalar" in text and "100.0%" in text
    assert "replicated on every device (80 bytes): ['key'], ['linear'].weight, ['linear'].bias" in text


def read_drawing(text):
    """Device numbers of each box, by where it starts along each dim that is drawn."""
    found, outer, columns, right = {}, {}, [None], None
    for line in text.splitlines()[1:]:
        dims = {int(dim): int(start) for dim, start in re.findall(r"dim (\d+) (\d+):", line)}
        if "|" in line:
            side, *cells, _ = line.split("|")
            assert len(cells) == len(columns)
            for column, cell in zip(columns, cells):
                along = dict(outer) | dims | ({} if right is None else {right: column})
                runs = [tuple(map(int, run.split("-"))) for run in cell.split()]
                found[tuple(sorted(along.items()))] = {n for run in runs for n in range(run[0], run[-1] + 1)}
        elif match := re.fullmatch(r" *dim (\d+) ((?: +\d+:\d+)+)", line):
            right, columns = int(match[1]), [int(part.split(":")[0]) for part in match[2].split()]
        elif dims:
            outer = dims
    return found


@pytest.mark.parametrize(
    "shape,spec,boxes",
    [
        ((), P(), 1),
        ((8, 4), P(), 1),
        ((8, 4), P("tensor"), 2),
        ((8, 4), P(None, "pipe"), 2),
        ((8, 4), P("fsdp", "tensor"), 4),
        ((16, 4), P(("tensor", "pipe", "fsdp")), 8),
        ((2, 6, 4, 8), P("pipe", None, "tensor", "fsdp"), 8),
        ((2, 4), P("context", "tensor"), 2),
    ],
    ids=str,
)
def test_a_drawing_of_an_array_can_be_read_back(mesh, shape, spec, boxes):
    text = draw_array(jax.ShapeDtypeStruct(shape, jnp.float32), spec, mesh)
    found = read_drawing(text)
    assert len(found) == boxes
    placed = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
    for shard in placed.addressable_shards:
        start = [part.indices(size)[0] for part, size in zip(shard.index, shape)]
        holding = [ids for along, ids in found.items() if all(start[dim] == at for dim, at in along)]
        assert len(holding) == 1 and shard.device.id in holding[0]
    assert sum(map(len, found.values())) == 8
    assert f"pieces of {list(placed.addressable_shards[0].data.shape)}" in text


def test_a_drawing_in_full(mesh):
    assert draw_array(jnp.zeros((8, 16)), P("fsdp", "tensor"), mesh).splitlines() == [
        "[8, 16] over fsdp=2 pipe=2 tensor=2, 8 devices: pieces of [4, 8], dim 0 over fsdp, dim 1 over tensor",
        "    dim 1   0:8    8:16",
        "          +------+------+",
        "dim 0 0:4 | 0 2  | 1 3  |",
        "          +------+------+",
        "dim 0 4:8 | 4 6  | 5 7  |",
        "          +------+------+",
    ]


@pytest.mark.parametrize(
    "spec,words",
    [
        (P("rows"), "no axis .'rows'."),
        (P("tensor"), "2 pieces do not divide dim 0, of size 3"),
        (P(None, None), "at most 1"),
    ],
    ids=str,
)
def test_a_spec_that_does_not_fit_is_refused(mesh, spec, words):
    with pytest.raises(ValueError, match=words):
        draw_array(np.zeros(3), spec, mesh)


def test_a_picture_is_written(mesh, tmp_path):
    shapes, specs = laid_out(mesh)
    path = tmp_path / "layout.png"
    plot_layout(shapes, specs, mesh, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 40 * 12
    plot_layout({"nothing": None, "x": np.zeros(3)}, {"nothing": None, "x": None}, mesh, path)
    assert path.read_bytes()[:8] == data[:8]
