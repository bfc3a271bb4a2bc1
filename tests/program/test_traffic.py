"""Bytes that a program's operations read and write, by its text, against counts by hand."""

from eqformer.program import count_moved_bytes, read_hlo


def moved_bytes(text):
    return count_moved_bytes(read_hlo(text))


# Three turns, each of which reads a slice of what is carried, multiplies it, and writes four rows of it in place. Of a
# TPU, whose vector memory is S(1), as of a GPU, whose cuBLAS has a workspace.
TEXT = """HloModule jit_f, is_scheduled=true

%slice (whole: f32[8,64,64], at: s32[]) -> f32[64,64] {
  %whole = f32[8,64,64]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %cut = f32[1,64,64]{2,1,0} dynamic-slice(%whole, %at, %at, %at), dynamic_slice_sizes={1,64,64}
  ROOT %flat = f32[64,64]{1,0} bitcast(%cut)
}

%named (given: f32[64,64]) -> f32[64,64] {
  %given = f32[64,64]{1,0} parameter(0)
  ROOT %same = f32[64,64]{1,0} bitcast(%given)
}

%put (target: f32[8,64,64], rows: s32[4,1], new: f32[4,64,64]) -> f32[8,64,64] {
  %target = f32[8,64,64]{2,1,0} parameter(0)
  %rows = s32[4,1]{1,0} parameter(1)
  %new = f32[4,64,64]{2,1,0} parameter(2)
  ROOT %put = f32[8,64,64]{2,1,0} scatter(%target, %rows, %new), to_apply=%second
}

%twice (one: f32[64,64]) -> f32[64,64] {
  %one = f32[64,64]{1,0} parameter(0)
  %other = f32[64,64]{1,0} fusion(%one), kind=kLoop, calls=%named
  ROOT %sum = f32[64,64]{1,0} add(%other, %other)
}

%body (carry: (s32[], f32[8,64,64], f32[4,64,64], s32[4,1])) -> (s32[], f32[8,64,64], f32[4,64,64], s32[4,1]) {
  %carry = (s32[], f32[8,64,64]{2,1,0}, f32[4,64,64]{2,1,0}, s32[4,1]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %slab = f32[8,64,64]{2,1,0} get-tuple-element(%carry), index=1
  %news = f32[4,64,64]{2,1,0} get-tuple-element(%carry), index=2
  %where = s32[4,1]{1,0} get-tuple-element(%carry), index=3
  %read = f32[64,64]{1,0} fusion(%slab, %number), kind=kLoop, calls=%slice
  %product = (f32[64,64]{1,0}, s8[1024]{0}) custom-call(%read, %read), custom_call_target="__cublas$gemm"
  %written = f32[8,64,64]{2,1,0} fusion(%slab, %where, %news), kind=kInput, calls=%put
  ROOT %back = (s32[], f32[8,64,64]{2,1,0}, f32[4,64,64]{2,1,0}, s32[4,1]{1,0}) tuple(%number, %written, %news, %where)
}

%condition (tested: (s32[], f32[8,64,64], f32[4,64,64], s32[4,1])) -> pred[] {
  %tested = (s32[], f32[8,64,64]{2,1,0}, f32[4,64,64]{2,1,0}, s32[4,1]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8,64,64], y: f32[4,64,64], z: s32[4,1], w: f32[64,64]) -> f32[8,64,64] {
  %x = f32[8,64,64]{2,1,0} parameter(0)
  %y = f32[4,64,64]{2,1,0} parameter(1)
  %z = s32[4,1]{1,0} parameter(2)
  %w = f32[64,64]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %near = (f32[64,64]{1,0:S(1)}, f32[64,64]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %here = f32[64,64]{1,0:S(1)} copy-done(%near)
  %doubled = f32[64,64]{1,0} fusion(%here), kind=kLoop, calls=%twice
  %start = (s32[], f32[8,64,64]{2,1,0}, f32[4,64,64]{2,1,0}, s32[4,1]{1,0}) tuple(%zero, %x, %y, %z)
  %loop = (s32[], f32[8,64,64]{2,1,0}, f32[4,64,64]{2,1,0}, s32[4,1]{1,0}) while(%start), condition=%condition,
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[8,64,64]{2,1,0} get-tuple-element(%loop), index=1
}
""".replace("condition=%condition,\n", "condition=%condition, ")
PAGE = 64 * 64 * 4


# Parts of a product, summed where they are read: one fusion reads a quarter of the sums, and one all of them.
SUMS = """HloModule jit_f, is_scheduled=true

%quarter (parts: f32[4,64,256]) -> bf16[64,64] {
  %parts = f32[4,64,256]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %sums = f32[64,256]{1,0} reduce(%parts, %zero), dimensions={0}, to_apply=%add
  %narrow = bf16[64,256]{1,0} convert(%sums)
  %cut = bf16[64,64]{1,0} slice(%narrow), slice={[0:64], [64:128]}
  ROOT %out = bf16[64,64]{1,0} negate(%cut)
}

%all (parts: f32[4,64,256]) -> bf16[64,256] {
  %parts = f32[4,64,256]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %sums = f32[64,256]{1,0} reduce(%parts, %zero), dimensions={0}, to_apply=%add
  ROOT %narrow = bf16[64,256]{1,0} convert(%sums)
}

ENTRY %main (x: f32[4,64,256]) -> bf16[64,256] {
  %x = f32[4,64,256]{2,1,0} parameter(0)
  %part = bf16[64,64]{1,0} fusion(%x), kind=kLoop, calls=%quarter
  ROOT %whole = bf16[64,256]{1,0} fusion(%x), kind=kLoop, calls=%all
}
"""


def test_of_a_sum_that_is_sliced_what_the_slice_sums_counts():
    parts = 4 * 64 * 256 * 4
    assert moved_bytes(SUMS) == parts / 4 + 64 * 64 * 2 + parts + 64 * 256 * 2
    assert moved_bytes(SUMS.replace("slice(%narrow)", "negate(%narrow)")) == parts * 2 + 64 * 64 * 2 + 64 * 256 * 2


def test_an_update_of_what_a_fusion_makes_is_not_in_place():
    update = "dynamic-update-slice(%narrow, %zero, %zero, %zero)"
    made = SUMS.replace("slice(%narrow), slice={[0:64], [64:128]}", update)
    assert moved_bytes(made) == 2 * 4 * 64 * 256 * 4 + 64 * 64 * 2 + 64 * 256 * 2


def test_a_view_in_other_tiles_is_no_copy():
    """As compilers for TPUs make them inside of a fusion that cuts a slice; without a word of aliasing it reads all."""
    start = "  %cut = f32[1,64,64]{2,1,0} dynamic-slice(%whole,"
    aliased = "output_to_operand_aliasing={{}: (0, {})}, "
    view = f"  %view = f32[8,64,64]{{2,1,0}} fusion(%whole), kind=kLoop, {aliased}calls=%tiles\n"
    tiles = """%tiles (given: f32[8,64,64]) -> f32[8,64,64] {
  %given = f32[8,64,64]{2,1,0:T(32,128)} parameter(0)
  ROOT %copy = f32[8,64,64]{2,1,0} copy(%given)
}

%slice"""
    text = TEXT.replace(start, view + start.replace("%whole", "%view")).replace("%slice", tiles, 1)
    assert moved_bytes(text) == moved_bytes(TEXT)
    assert moved_bytes(text.replace(aliased, "")) == moved_bytes(TEXT) + 3 * 7 * PAGE


def test_of_a_kernel_that_says_what_it_reads_that_counts():
    kernel = 'custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"bytes_accessed":"1000"}}'
    called = SUMS.replace("fusion(%x), kind=kLoop, calls=%quarter", f"custom-call(%x), {kernel}")
    assert moved_bytes(called) == 1000 + 4 * 64 * 256 * 4 + 64 * 256 * 2
    near = called.replace("%x = f32[4,64,256]{2,1,0} par", "%x = f32[4,64,256]{2,1,0:S(1)} par")
    assert moved_bytes(near) == 64 * 256 * 2  # it reads vector memory
    silent = called.replace("bytes_accessed", "flops")
    assert moved_bytes(silent) == moved_bytes(called) - 1000 + 4 * 64 * 256 * 4 + 64 * 64 * 2


def test_slices_count_where_slices_are_read_and_written():
    a_turn = 2 * PAGE + 4 + 3 * PAGE + 2 * 4 * PAGE + 16  # a slice, its square, four pages that are put in their rows
    assert moved_bytes(TEXT) == 3 * a_turn + 2 * PAGE  # and `w` into vector memory, and its double out of there
    whole = TEXT.replace("dynamic-slice(%whole, %at, %at, %at)", "negate(%whole)")
    assert moved_bytes(whole) == moved_bytes(TEXT) + 3 * (7 * PAGE - 4)  # the control: all of it is read


def test_a_fusion_beside_other_work_counts_as_it_would_alone():
    fusion = "%read = f32[64,64]{1,0} fusion(%slab, %number), kind=kLoop, calls=%slice"
    result = "((f32[8,64,64]{2,1,0}, s32[]), f32[64,64]{1,0}, u32[])"  # what it is given, what it gives, a number
    start = f"%start = {result} fusion-start(%slab, %number), kind=kLoop, calls=%slice"
    assert fusion in TEXT
    beside = TEXT.replace(fusion, f"{start}\n  %read = f32[64,64]{{1,0}} fusion-done(%start)")
    assert moved_bytes(beside) == moved_bytes(TEXT)
    whole = beside.replace("dynamic-slice(%whole, %at, %at, %at)", "negate(%whole)")
    assert moved_bytes(whole) == moved_bytes(TEXT) + 3 * (7 * PAGE - 4)  # the control: all of it is read


def test_memory_that_nobody_has_written_is_not_moved():
    unwritten = '%x = f32[4,64,256]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"'
    parameter = "%x = f32[4,64,256]{2,1,0} parameter(0)"
    assert moved_bytes(SUMS.replace(parameter, unwritten)) == moved_bytes(SUMS)
    other = unwritten.replace("AllocateBuffer", "Fill")
    assert moved_bytes(SUMS.replace(parameter, other)) == moved_bytes(SUMS) + 4 * 64 * 256 * 4  # the control
