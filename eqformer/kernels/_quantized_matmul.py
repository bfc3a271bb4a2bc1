"""Products of vectors with a quantized matrix: formats of codes, the definition, blocks on CPUs, a kernel for GPUs."""

import functools
import importlib.util
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from ._op import Call, Implementation
from ._platform import at_least_float32, gpu_capability, Ref, varying_of
from ._triton import (
    FP8_CAPABILITY,
    full_span,
    is_inside,
    load_part,
    padded_dim,
    PaddedSpan,
    pallas_and_triton,
    select_part,
    SMALLEST_DIM,
    TRITON,
)


BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
"""Bits of one code, by format."""


def codes_in_a_byte(form: str) -> int:
    """Return how many codes share a byte: 1 or 2."""
    return 8 // BITS[form]


def decode_matrix(
    codes: UInt8[Array, "*dims columns"],
    form: str,
    scales: Float[Array, "*scale_dims"] | UInt8[Array, "*scale_dims"],
    zeros: UInt8[Array, "*dims groups"] | Float[Array, "*dims groups"] | None,
) -> Float32[Array, "*dims all_columns"]:
    """Decode a weight; two codes of 4 bits share a byte, and the low bits come first."""
    if codes_in_a_byte(form) == 2:
        pairs = codes[..., None] >> jnp.array([0, 4], jnp.uint8)
        codes = (pairs & 15).reshape(*codes.shape[:-1], -1)
    return apply_scales(decode_numbers(codes, form, repeat_zeros(zeros, codes.shape)), scales)


def decode_numbers(
    codes: UInt8[Array, "*dims columns"], form: str, zeros: Float32[Array, "*dims _"] | None
) -> Float32[Array, "*dims columns"]:
    """Decode codes, one in each byte, to unscaled numbers, elementwise, so that kernels can decode in registers.

    Codes of `int8` and `int4` are unsigned integers. A zero point is subtracted from each code: an entry of `zeros`,
    which broadcasts against the codes, or half of the range if `zeros` is None. `fp8` is E4M3 without infinities; `fp4`
    is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives).
    """
    if form == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if form == "fp4":
        # The magnitudes times two are the hex digits of one constant: a shift is faster than a table lookup.
        halves = (jnp.uint32(0xC8643210) >> (4 * (codes & 7).astype(jnp.uint32))) & 15
        return jnp.where(codes > 7, -0.5, 0.5).astype(jnp.float32) * halves.astype(jnp.float32)
    return codes.astype(jnp.float32) - (2.0 ** (BITS[form] - 1) if zeros is None else zeros)


def repeat_zeros(
    zeros: UInt8[Array, "*dims groups"] | Float[Array, "*dims groups"] | None, shape: tuple[int, ...]
) -> Float32[Array, "*dims columns"] | None:
    """Return the zero point of each code in float32, or None if there are no zero points."""
    return None if zeros is None else repeat_groups(zeros.astype(jnp.float32), shape)


def apply_scales(
    numbers: Float32[Array, "*dims columns"], scales: Float[Array, "*scale_dims"] | UInt8[Array, "*scale_dims"]
) -> Float32[Array, "*dims columns"]:
    """Multiply numbers by their group's scale, in float32; scales of 8 bits are exponents, `2**(scale - 127)`.

    Products below `2**-126` become 0 on platforms that flush subnormal numbers, as most do.
    """
    for factor in scale_factors(scales):
        numbers = numbers * repeat_groups(factor, numbers.shape)
    return numbers


def scale_factors(
    scales: Float[Array, "*scale_dims"] | UInt8[Array, "*scale_dims"],
) -> tuple[Float32[Array, "*scale_dims"], ...]:
    """Return the factors, one after another, that multiply the numbers of each group."""
    if scales.dtype != jnp.uint8:
        return (scales.astype(jnp.float32),)
    # The scale's bits become a float32's exponent. 2**-127 (scale 0) is subnormal in float32, so for this scale the
    # numbers are halved and then multiplied by 2**-126.
    halving = jnp.where(scales == 0, 0.5, 1.0).astype(jnp.float32)
    exponents = jnp.maximum(scales, jnp.uint8(1)).astype(jnp.int32) << 23
    return halving, jax.lax.bitcast_convert_type(exponents, jnp.float32)


def repeat_groups(groups: Float32[Array, "*groups"], shape: tuple[int, ...]) -> Float32[Array, "*dims"]:
    """Repeat each group's value for every member of the group; groups divide the last dim of `shape` evenly."""
    times = shape[-1] // groups.shape[-1]
    return jnp.broadcast_to(jnp.repeat(groups, times, axis=-1) if times > 1 else groups, shape)


class QuantizedMatmulCall(Call):
    """The arguments of `y = x W^T` with a matrix `W` of codes, scales and zero points, as `decode_matrix` decodes it.

    The groups of a row of the matrix have equal sizes.
    """

    x: Float[Array, "*batch inputs"]
    """The vectors."""
    codes: UInt8[Array, "outputs bytes"]
    """Codes of the matrix; two codes of 4 bits share a byte, the low bits first."""
    scales: Float[Array, "outputs groups"] | UInt8[Array, "outputs groups"]
    """A scale, or an exponent of 8 bits, for each group of a row."""
    zeros: UInt8[Array, "outputs groups"] | Float[Array, "outputs groups"] | None
    """A zero point for each group, a byte or a float; None: half of the range."""
    form: str = eqx.field(static=True)
    """The number format: int8, int4, fp8 or fp4."""

    operation = "quantized matmul"

    def describe(self) -> str:
        """Return shapes and dtypes for an error message."""
        return f"vectors {self.x.dtype}{list(self.x.shape)} and {self.form} codes {list(self.codes.shape)}"


class DecodedMatmul(Implementation[QuantizedMatmulCall, Array]):
    """The definition: the matrix is decoded in float32, rounded to the dtype of the vectors, and multiplied."""

    def supports(self, call: QuantizedMatmulCall) -> str | None:
        """Return None: every call is supported."""
        return None

    def run(self, call: QuantizedMatmulCall) -> Float[Array, "*batch outputs"]:
        """Compute the call."""
        matrix = decode_matrix(call.codes, call.form, call.scales, call.zeros).astype(call.x.dtype)
        return jnp.einsum("...i,oi->...o", call.x, matrix, preferred_element_type=call.x.dtype)


class BlockwiseMatmul(Implementation[QuantizedMatmulCall, Array]):
    """The product in blocks of about 256 rows of the matrix, each decoded into the processor's cache, for CPUs.

    XLA has no product that reads codes. Without blocks, XLA would write the decoded matrix to memory that it allocates
    at each call, and the page faults cost more than the product. Placing the two codes of a byte side by side would be
    slow, so the low codes (for the even inputs) and the high codes (for the odd inputs) are two matrices. The result
    equals `DecodedMatmul`'s up to the order of sums in float32.
    """

    def supports(self, call: QuantizedMatmulCall) -> str | None:
        """Return the reason why blocks are not faster or not possible, or None."""
        outputs = call.codes.shape[0]
        if (vectors := math.prod(call.x.shape[:-1])) > _MAX_VECTORS:
            return f"it takes up to {_MAX_VECTORS} vectors, not {vectors}"
        if call.codes.size < _SMALLEST[codes_in_a_byte(call.form)]:
            return f"a matrix of {call.codes.size:,} bytes fits into the cache when it is decoded as a whole"
        if _block_rows(outputs) is None:
            return f"{outputs} rows of the matrix have no divisor from {_MIN_ROWS} to {_MAX_ROWS}"
        if codes_in_a_byte(call.form) == 2 and call.codes.shape[1] % call.scales.shape[1]:
            return "a group of an odd number of codes shares a byte with the next group"
        return None

    def run(self, call: QuantizedMatmulCall) -> Float[Array, "*batch outputs"]:
        """Compute the call."""
        inputs, outputs = call.x.shape[-1], call.codes.shape[0]
        vectors = call.x.reshape(-1, inputs)
        parts, sum_dtype = codes_in_a_byte(call.form), at_least_float32(vectors.dtype)
        # Input vectors of the low codes, and input vectors of the high codes.
        part_vectors = [vectors[:, first::parts] for first in range(parts)]

        def multiply_block(block: tuple[Array, Array, Array | None]) -> Float[Array, "rows vectors"]:
            codes, scales, zeros = block
            part_codes = [codes] if parts == 1 else [codes & 15, codes >> 4]
            numbers = [decode_numbers(part, call.form, repeat_zeros(zeros, part.shape)) for part in part_codes]
            matrices = [apply_scales(part, scales).astype(vectors.dtype) for part in numbers]
            multiply = functools.partial(jnp.einsum, "oi,vi->ov", preferred_element_type=sum_dtype)
            products = map(multiply, matrices, part_vectors)
            return functools.reduce(jnp.add, products).astype(vectors.dtype)

        split = lambda array: array.reshape(-1, _block_rows(outputs), array.shape[1])
        blocks = jax.tree.map(split, (call.codes, call.scales, call.zeros))
        y = jax.lax.map(multiply_block, blocks).reshape(outputs, len(vectors))
        return y.T.reshape(*call.x.shape[:-1], outputs)


_SMALLEST = {1: 2**20, 2: 2**16}  # Least bytes of a matrix for which blocks are faster, by codes in a byte.
_MIN_ROWS, _MAX_ROWS = 64, 512
_MAX_VECTORS = 64


def _block_rows(outputs: int) -> int | None:
    """Return how many rows of the matrix are decoded at a time: the divisor of all rows nearest to 256, or None."""
    divisors = [rows for rows in range(_MIN_ROWS, _MAX_ROWS + 1) if outputs % rows == 0]
    return min(divisors, key=lambda rows: abs(rows - 256), default=None)


# A Pallas (Triton) kernel for NVIDIA GPUs, which decodes codes on their way to the product.
#
# XLA for GPUs writes the decoded weight to main memory and reads it again: a product of 64 vectors in bfloat16 then
# moves five times the bytes of int8 codes, and more than a weight in bfloat16. The kernel reads the codes once and
# decodes a block of them in registers, by the same formula and with the same rounding as the definition. For many
# vectors, writing and reading the decoded weight is a small part of the work, so the definition computes such calls.

_MAX_GPU_VECTORS = 128  # A program keeps all vectors' sums in registers.
_OUTPUTS = 64  # Outputs of a program.
_BLOCK_BYTES = 128  # Most bytes of an output's codes in a block.
_PROGRAMS = 264  # Programs that fill a GPU: two for each of the 132 multiprocessors of an H100.


class QuantizedMatmulGpu(Implementation[QuantizedMatmulCall, Array]):
    """The product by a Triton kernel, in 16 bits: a program decodes blocks of the codes of 64 outputs.

    If there are too few outputs to give all multiprocessors work, the inputs are cut into chunks, and the sums of the
    chunks are added afterwards. `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: QuantizedMatmulCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        if call.x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {call.x.dtype}"
        if not 1 <= (vectors := math.prod(call.x.shape[:-1])) <= _MAX_GPU_VECTORS:
            return f"it takes 1 to {_MAX_GPU_VECTORS} vectors, not {vectors}"
        if (size := _block_bytes(call)) < SMALLEST_DIM:
            return f"it takes groups of a multiple of {SMALLEST_DIM} bytes of codes, not of {size}"
        if call.form == "fp8" and gpu_capability() < FP8_CAPABILITY:
            return f"Triton reads fp8 on GPUs of compute capability {FP8_CAPABILITY} and above"
        if importlib.util.find_spec(TRITON) is None:
            return f"this JAX has no {TRITON}"
        return None

    def run(self, call: QuantizedMatmulCall) -> Float[Array, "*batch outputs"]:
        """Compute the call by the kernel on every platform."""
        return _multiply(call, self.interpret)


class _MatmulArrays(NamedTuple):
    """Arrays that the kernel reads."""

    parts: list[Float[Array, "padded_rows bytes"]]
    """The inputs of the vectors. If two codes share a byte: the inputs of low codes, then the inputs of high codes."""
    codes: UInt8[Array, "outputs bytes"]
    scales: Float[Array, "outputs groups"] | UInt8[Array, "outputs groups"]
    zeros: UInt8[Array, "outputs groups"] | Float[Array, "outputs groups"] | None


class _MatmulSizes(NamedTuple):
    """The static sizes of a call to the kernel."""

    form: str
    outputs: int
    """Outputs of a program."""
    block: int
    """Bytes of a block of an output's codes."""
    chunk_blocks: int
    """Blocks of a chunk."""


def _block_bytes(call: QuantizedMatmulCall) -> int:
    """Return the bytes of a block: the largest power of two, up to a limit, that divides a group's bytes."""
    group_bytes = call.codes.shape[1] // call.scales.shape[1]
    return min(_BLOCK_BYTES, group_bytes & -group_bytes)


def _multiply(call: QuantizedMatmulCall, interpret: bool) -> Float[Array, "*batch outputs"]:
    """Call the kernel; its grid is blocks of outputs, and chunks of inputs."""
    pl, triton = pallas_and_triton()
    (outputs, code_bytes), parts = call.codes.shape, codes_in_a_byte(call.form)
    vectors = call.x.reshape(-1, call.x.shape[-1])
    rows = len(vectors)
    block, padded_rows = _block_bytes(call), padded_dim(rows)
    blocks, output_blocks = code_bytes // block, -(-outputs // _OUTPUTS)
    # A chunk's sums in float32 are written and read: with more chunks, they would be more bytes than the codes.
    max_chunks = max(1, code_bytes // (8 * padded_rows))
    chunk_blocks = -(-blocks // min(blocks, max_chunks, -(-_PROGRAMS // output_blocks)))
    chunks = -(-blocks // chunk_blocks)
    x = jnp.pad(vectors, ((0, padded_rows - rows), (0, 0))).reshape(padded_rows, code_bytes, parts)
    arrays = _MatmulArrays([x[:, :, part] for part in range(parts)], call.codes, call.scales, call.zeros)
    shape = chunks, padded_rows, outputs
    sums = pl.pallas_call(
        functools.partial(_kernel, _MatmulSizes(call.form, _OUTPUTS, block, chunk_blocks)),
        grid=(output_blocks, chunks),
        out_specs=pl.BlockSpec((None, padded_rows, _OUTPUTS), lambda outputs, chunk: (chunk, 0, outputs)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying_of(arrays)),
        compiler_params=triton.CompilerParams(num_warps=4 if padded_rows <= 64 else 8, num_stages=3),
        interpret=interpret,
        name="quantized_matmul",
    )(arrays)
    product = jnp.sum(sums, axis=0)[:rows].astype(call.x.dtype)
    return product.reshape(*call.x.shape[:-1], outputs)


def _kernel(sizes: _MatmulSizes, arrays: _MatmulArrays, sums: Ref) -> None:
    """Compute the products of all vectors with a chunk of the codes of some outputs."""
    pl, triton = pallas_and_triton()
    (padded_rows, code_bytes), (all_outputs, groups) = arrays.parts[0].shape, arrays.scales.shape
    outputs = PaddedSpan(pl.program_id(0) * sizes.outputs, sizes.outputs, all_outputs)
    rows, chunk = full_span(padded_rows), pl.program_id(1)
    blocks = code_bytes // sizes.block

    def add_block(block: Array, total: Array) -> Array:
        columns = PaddedSpan(block * sizes.block, sizes.block, code_bytes)
        group = PaddedSpan(block * sizes.block // (code_bytes // groups), 1, groups)
        codes = load_part(arrays.codes, outputs, columns)
        factors = scale_factors(load_part(arrays.scales, outputs, group))
        zeros = None if arrays.zeros is None else load_part(arrays.zeros, outputs, group).astype(jnp.float32)
        for part, inputs in enumerate(arrays.parts):
            is_alone = len(arrays.parts) == 1
            part_codes = codes if is_alone else (codes >> jnp.uint8(BITS[sizes.form] * part)) & jnp.uint8(15)
            numbers = decode_numbers(part_codes, sizes.form, zeros)
            for factor in factors:
                numbers = numbers * factor
            x = load_part(inputs, rows, columns)
            total = total + triton.dot(x, numbers.astype(x.dtype).T)
        return total

    stop = jnp.minimum((chunk + 1) * sizes.chunk_blocks, blocks)
    zeros = jnp.zeros((padded_rows, sizes.outputs), jnp.float32)
    total = jax.lax.fori_loop(chunk * sizes.chunk_blocks, stop, add_block, zeros)
    columns = PaddedSpan(0, sizes.outputs, all_outputs - outputs.begin)
    triton.store(select_part(sums, rows, columns), total, mask=is_inside(rows, columns))
