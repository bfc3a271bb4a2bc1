"""Bytes of communication that are read from compiled programs, against counts by hand."""

import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqformer.parallel import vary
from eqformer.planning import communication_table
from eqformer.program import bytes_sent, largest_buffers, list_transfers, read_hlo, Transfer
from eqformer.program._hlo_text import scopes_of


MESH = (2, 4)  # "other", "axis"
SIZE = 8 * 3 * 4  # bytes of x on a device
RING = [(i, (i + 1) % 4) for i in range(4)]


def mesh():
    return jax.make_mesh(MESH, ("other", "axis"), (AxisType.Auto,) * 2)


def compiled(fn, *more):
    """`fn` of each device's `(8, 3)` piece of float32, compiled."""
    axes = ("other", "axis")
    specs = (P(), *(P() for _ in more))
    each = lambda x, *args: vary(fn(vary(x, axes), *args), axes)[None, None]
    run = jax.shard_map(each, mesh=mesh(), in_specs=specs, out_specs=P(*axes), check_vma=True)
    return jax.jit(run).lower(np.zeros((8, 3), np.float32), *more).compile()


def sums(transfers):
    return {(t.kind, t.axes, t.times): t.sent for t in transfers}


def test_each_collective_alone():
    def each(x):
        first, second = jax.lax.psum((x, x[:4]), "axis")
        whole = jax.lax.all_gather(x, "other", tiled=True)
        part = jax.lax.psum_scatter(x + 1, ("other", "axis"), tiled=True)
        turned = jax.lax.all_to_all(x + 2, "axis", 0, 0, tiled=True)
        passed = jax.lax.ppermute(x + 3, "axis", RING[:2])
        return sum(y.sum() for y in (first, second, whole, part, turned, passed))

    program = compiled(each)
    bytes_by_collective = sums(list_transfers(read_hlo(program, mesh=mesh())))
    assert bytes_by_collective == {
        ("all-reduce", ("axis",), 1): 2 * 3 / 4 * 1.5 * SIZE,
        ("all-gather", ("other",), 1): 1 / 2 * 2 * SIZE,
        ("reduce-scatter", ("other", "axis"), 1): 7 / 8 * SIZE,
        ("all-to-all", ("axis",), 1): 3 / 4 * SIZE,
        ("collective-permute", ("axis",), 1): 2 / 4 * SIZE,
    }
    unnamed = list_transfers(read_hlo(program))
    assert [t.axes for t in unnamed] == [None] * 5
    assert sorted(t.devices for t in unnamed) == [2, 4, 4, 4, 8]
    assert bytes_sent(unnamed) == sum(bytes_by_collective.values())
    assert bytes_sent(list_transfers(read_hlo(program, mesh=mesh())), axes=("axis",)) == (2.25 + 0.75 + 0.5) * SIZE


def test_loops_are_multiplied_out_and_the_dearest_branch_is_counted():
    def loops(x, bound):
        step = lambda i, y: jax.lax.ppermute(2 * y, "axis", RING)
        x, _ = jax.lax.scan(lambda y, _: (vary(jax.lax.psum(y * y, "axis"), ["axis"]), None), x, None, length=5)
        x, _ = jax.lax.scan(lambda y, _: (jax.lax.fori_loop(0, 3, step, y), None), x, None, length=6)
        many = lambda y: jax.lax.all_gather(y, "axis", tiled=True)[:8]
        few = lambda y: jnp.tile(jax.lax.psum_scatter(y, "axis", tiled=True), (4, 1))
        x = jax.lax.cond(bound > 3, many, few, x)
        return jax.lax.fori_loop(0, bound, lambda i, y: jax.lax.all_to_all(y + 1, "axis", 0, 0, tiled=True), x)

    transfers = list_transfers(read_hlo(compiled(loops, 4), mesh=mesh()))
    assert sums(transfers) == {
        ("all-reduce", ("axis",), 5): 2 * 3 / 4 * SIZE,
        ("collective-permute", ("axis",), 18): SIZE,
        ("all-gather", ("axis",), 1): 3 * SIZE,
        ("all-to-all", ("axis",), None): 3 / 4 * SIZE,
    }
    known = [t for t in transfers if t.times]
    assert bytes_sent(known) == (5 * 1.5 + 18 + 3) * SIZE
    with pytest.raises(ValueError, match="these collectives are in a loop of unknown length: .*all-to-all"):
        bytes_sent(transfers)
    table = communication_table(transfers)
    assert [line.split()[0] for line in table.splitlines()][2:] == [
        "collective-permute",
        "all-reduce",
        "all-gather",
        "all-to-all",
        "all",
    ]
    assert "2,736+?" in table.splitlines()[-1] and "1,728" in table.splitlines()[2]


TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (p: bf16[16,8]) -> bf16[2,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  ROOT %rs = bf16[2,8]{1,0} reduce-scatter(%p), channel_id=3, replica_groups={}, dimensions={0}, to_apply=%sum
}

ENTRY %main (x: bf16[16,8], y: pred[64]) -> bf16[16,8] {
  %x = bf16[16,8]{1,0:T(8,128)} parameter(0)
  %y = pred[64]{0} parameter(1)
  %ag-start = (bf16[16,8]{1,0}, bf16[64,8]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %ag-done = bf16[64,8]{1,0} all-gather-done(%ag-start)
  %ar-start = (bf16[16,8]{1,0}, pred[64]{0}) all-reduce-start(%x, /*index=1*/%y), replica_groups=[4,2]<=[8]
  %ar-done = (bf16[16,8]{1,0}, pred[64]{0}) all-reduce-done(%ar-start)
  %cp-start = (bf16[16,8], bf16[16,8], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,0},{1,2}}
  %cp-done = bf16[16,8]{1,0} collective-permute-done(%cp-start)
  %rs-start = ((bf16[16,8]{1,0}), bf16[2,8]{1,0}) async-start(%x), calls=%wrapped
  %rs-done = bf16[2,8]{1,0} async-done(%rs-start), calls=%wrapped
  %alone = bf16[16,8]{1,0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
  ROOT %out = bf16[16,8]{1,0} copy(%alone)
}
"""


def test_asynchronous_pairs_count_once_and_groups_are_read_in_every_form():
    mesh = jax.make_mesh((4, 2), ("first", "second"), (AxisType.Auto,) * 2)
    x = 16 * 8 * 2
    assert list_transfers(read_hlo(TEXT, mesh=mesh)) == (
        Transfer("all-gather", ("first",), 4, 3.0 * x, 1),
        Transfer("all-reduce", ("second",), 2, 1.0 * (x + 64), 1),
        Transfer("collective-permute", ("first", "second"), 1, x / 8, 1),
        Transfer("reduce-scatter", ("first", "second"), 8, 7 / 8 * x, 1),
    )
    crooked = TEXT.replace("[4,2]<=[8]", "{{0,3},{1,2},{4,7},{5,6}}")
    assert list_transfers(read_hlo(crooked, mesh=mesh))[1].axes is None


def test_a_transfer_is_known_by_the_names_of_its_scopes():
    """In both passes, in a loop, and where what a name stands around is made one with something else."""

    def named(x):
        def layer(x, _):
            with jax.named_scope("my rows"):
                return jnp.tanh(jax.lax.all_gather(x, "axis", tiled=True))[:8], None

        with jax.named_scope("my copies"):
            x = vary(x, ["axis"])
        x, _ = jax.lax.scan(layer, x, None, length=3)
        with jax.named_scope("outer"), jax.named_scope("my sum"):
            return jax.lax.psum(jnp.sum(x), "axis")

    transfers = list_transfers(read_hlo(compiled(jax.grad(lambda x: named(x))), mesh=mesh()))
    found = {(t.kind, t.named({"my rows", "my sum", "my copies"})) for t in transfers}
    assert {("all-gather", "my rows"), ("reduce-scatter", "my rows")} <= found
    assert all(t.named({"other"}) is None for t in transfers)
    assert "my rows" in communication_table(transfers, names={"my rows"}).splitlines()[2]
    scopes = 'metadata={op_name="jit(f)/shard_map/transpose(jvp(two words))/(a/psum:checkpoint/b/psum)" id=1}'
    assert scopes_of(scopes) == ("f", "shard_map", "two words", "a", "psum", "checkpoint", "b", "psum")
    assert scopes_of("channel_id=1") == ()


# A ragged all-to-all as XLA writes it for GPUs, begun and waited for, without its scopes; and at once, for TPUs.
RUNS = "%runs, %runs, %runs, %runs), replica_groups={{0,1,2,3},{4,5,6,7}}"
GIVEN = "(f32[64,16]{1,0}, f32[80,16]{1,0}, s64[8]{0}, s64[8]{0}, s64[8]{0}, s64[8]{0})"
RAGGED = f"""HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (rows: f32[64,16], runs: s64[8]) -> f32[64,16] {{
  %rows = f32[64,16]{{1,0}} parameter(0)
  %runs = s64[8]{{0}} parameter(1)
  %room = f32[80,16]{{1,0}} fusion(%rows), kind=kLoop, calls=%zeros, metadata={{op_name="jvp(my rows)/broadcast"}}
  %start = ({GIVEN}, f32[80,16]{{1,0}}) ragged-all-to-all-start(%rows, %room, {RUNS}
  %there = f32[80,16]{{1,0}} ragged-all-to-all-done(%start)
  %own = f32[64,16]{{1,0}} fusion(%there), kind=kLoop, calls=%zeros
  ROOT %back = f32[64,16]{{1,0}} ragged-all-to-all(%there, %own, {RUNS}, metadata={{op_name="jit(f)/my way back/b"}}
}}
"""


@pytest.mark.quick
def test_a_ragged_all_to_all_sends_its_rows_and_writes_over_what_it_is_given():
    """Of the array with room to spare no more than the other has: with an even load there are no other rows."""
    first, second = list_transfers(read_hlo(RAGGED))
    rows = 3 / 4 * 64 * 16 * 4
    assert (first.kind, first.sent, first.devices) == ("ragged-all-to-all", rows, 4) and second.sent == rows
    assert (first.named({"my rows"}), second.named({"my way back"})) == ("my rows", "my way back")
    shorter = list_transfers(read_hlo(RAGGED.replace("f32[80,16]", "f32[32,16]")))  # in a round that takes half of them
    assert [transfer.sent for transfer in shorter] == [rows / 2] * 2
    assert largest_buffers(RAGGED)[0] == 80 * 16 * 4
    apart = RAGGED.replace("ragged-all-to-all", "all-to-all")
    assert largest_buffers(apart)[0] == 2 * 80 * 16 * 4  # the control: with another result


def test_what_cannot_be_read_is_refused():
    other = jax.make_mesh((2,), ("other",), (AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="2 devices, but the program was compiled for 8"):
        list_transfers(read_hlo(TEXT, mesh=other))
    with pytest.raises(ValueError, match="has no ENTRY"):
        list_transfers(read_hlo("module @jit_f {}"))
    with pytest.raises(ValueError, match="replica_groups must have one of the forms"):
        list_transfers(read_hlo(TEXT.replace("[2,4]<=[4,2]T(1,0)", "@mesh")))


def test_control_a_loop_counted_once_would_be_seen():
    run = lambda length: compiled(
        lambda x: jax.lax.scan(lambda y, _: (jax.lax.ppermute(y * 2, "axis", RING), None), x, None, length=length)[0]
    )
    sent = lambda length: bytes_sent(list_transfers(read_hlo(run(length))))
    assert sent(12) == 12 / 9 * sent(9) == 12 * SIZE


# From the step of a Llama (two layers of the real width, fsdp 4) compiled for v5e:2x2 by libtpu 0.0.42: a loop over
# layers, a gather that runs beside a product, and a reduce-scatter that is fused with its slice; other lines left out.
V5E = (pathlib.Path(__file__).parent / "programs" / "v5e.hlo").read_text()
GATHER, SCATTER = 3 / 4 * 8 * 128 * 4096 * 2, 3 / 4 * 128576 * 4096 * 4


def test_a_program_for_tpus():
    gather, scatter = list_transfers(read_hlo(V5E))
    assert (gather.kind, gather.sent, gather.times, gather.hidden) == ("all-gather", GATHER, 2, True)
    assert "weights over fsdp" in gather.scopes
    assert (scatter.kind, scatter.sent, scatter.times, scatter.hidden) == ("reduce-scatter", SCATTER, 1, False)


def test_what_a_program_for_tpus_would_be_counted_as_otherwise():
    longer, _ = list_transfers(read_hlo(V5E.replace("s32[]{:T(128)} constant(2)", "s32[]{:T(128)} constant(7)")))
    later, _ = list_transfers(read_hlo(V5E.replace("s32[]{:T(128)} constant(0)", "s32[]{:T(128)} constant(1)")))
    unknown, _ = list_transfers(read_hlo(V5E.replace("direction=LT", "direction=NE")))
    assert (longer.times, later.times, unknown.times) == (7, 1, None)
    alone = "\n".join(line for line in V5E.splitlines() if "%fusion.602 = " not in line and "(%fusion.602)" not in line)
    at_once, _ = list_transfers(read_hlo(alone.replace("%get-tuple-element.5989,", "%get-tuple-element.5979,")))
    assert (at_once.times, at_once.hidden) == (2, False)
    _, summed = list_transfers(read_hlo(V5E.replace("AllReduceScatterFusion", "Other")))
    assert (summed.kind, summed.sent) == ("all-reduce", 2 * SCATTER)


# A loop over eight layers of 4,096 to 14,336 channels over fsdp 16, compiled for v5p:2x2x4 by libtpu 0.0.42.1 with
# gathers by SparseCores: the first of a layer is waited for after casts of the others', each of these after a product.
V5P = (pathlib.Path(__file__).parent / "programs" / "v5p.hlo").read_text()


def test_casts_hide_no_gather_and_products_do():
    gathers = list_transfers(read_hlo(V5P))
    assert [(transfer.kind, transfer.sent, transfer.times) for transfer in gathers] == [
        ("all-gather", 15 * 896 * 4096 * 2.0, 8)
    ] * 3
    assert [transfer.hidden for transfer in gathers] == [False, True, True]
    assert [transfer.hidden for transfer in list_transfers(read_hlo(V5P.replace(" convolution(", " add(")))] == [
        False
    ] * 3


def test_a_program_whose_text_cannot_be_had():
    program = mock.Mock(spec=jax.stages.Compiled)
    program.as_text.side_effect = RuntimeError("INTERNAL: RET_CHECK failure async-update\nmore")
    with pytest.raises(ValueError, match="compiler cannot write the text of this program.*async-update$"):
        list_transfers(read_hlo(program))
