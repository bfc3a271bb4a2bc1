"""Products of a few vectors with a quantized weight on NVIDIA GPUs: codes are decoded on their way to the product.

XLA for GPUs writes the decoded weight to main memory and reads it again: a product of 64 vectors in bfloat16 then moves
five times the bytes of int8 codes, and more than a weight in bfloat16. The kernel (Pallas by Triton) reads the codes
once and decodes a block of them in registers, by the same formula and with the same rounding as the definition. For
many vectors, to write and read the decoded weight is a small part of the work, so the definition computes such calls.
"""

import functools
import importlib.util
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from ._op import Implementation
from ._platform import gpu_capability, Ref, varying_of
from ._quantized_matmul import BITS, codes_in_a_byte, decode_numbers, QuantizedMatmulCall, scale_factors
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


_MAX_ROWS = 128  # A program keeps all vectors' sums in registers.
_OUTPUTS = 64  # Outputs of a program.
_BLOCK_BYTES = 128  # Most bytes of an output's codes in a block.
_PROGRAMS = 264  # Programs that fill a GPU: two for each of the 132 multiprocessors of an H100.


class QuantizedMatmulGpu(Implementation[QuantizedMatmulCall, Array]):
    """The product by Triton, in 16 bits: a program decodes blocks of the codes of 64 outputs.

    Few outputs would leave multiprocessors without work. The inputs are then cut into chunks, whose sums are added
    afterwards. `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: QuantizedMatmulCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        if call.x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {call.x.dtype}"
        if not 1 <= (vectors := math.prod(call.x.shape[:-1])) <= _MAX_ROWS:
            return f"it takes 1 to {_MAX_ROWS} vectors, not {vectors}"
        if (size := _block_bytes(call)) < SMALLEST_DIM:
            return f"it takes groups of a multiple of {SMALLEST_DIM} bytes of codes, not of {size}"
        if call.form == "fp8" and gpu_capability() < FP8_CAPABILITY:
            return f"Triton reads fp8 on GPUs of compute capability {FP8_CAPABILITY} and above"
        if importlib.util.find_spec(TRITON) is None:
            return f"this JAX has no {TRITON}"
        return None

    def run(self, call: QuantizedMatmulCall) -> Float[Array, "*batch outputs"]:
        """Compute the call by the kernel, whatever the platform."""
        return _multiply(call, self.interpret)


class _ProgramArrays(NamedTuple):
    """Arrays that the kernel reads."""

    parts: list[Float[Array, "padded_rows bytes"]]
    """The vectors' inputs; if two codes share a byte, those of the low bits, and those of the high bits."""
    codes: UInt8[Array, "outputs bytes"]
    scales: Float[Array, "outputs groups"] | UInt8[Array, "outputs groups"]
    zeros: UInt8[Array, "outputs groups"] | Float[Array, "outputs groups"] | None


class _BlockSizes(NamedTuple):
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
    arrays = _ProgramArrays([x[:, :, part] for part in range(parts)], call.codes, call.scales, call.zeros)
    shape = chunks, padded_rows, outputs
    sums = pl.pallas_call(
        functools.partial(_kernel, _BlockSizes(call.form, _OUTPUTS, block, chunk_blocks)),
        grid=(output_blocks, chunks),
        out_specs=pl.BlockSpec((None, padded_rows, _OUTPUTS), lambda outputs, chunk: (chunk, 0, outputs)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying_of(arrays)),
        compiler_params=triton.CompilerParams(num_warps=4 if padded_rows <= 64 else 8, num_stages=3),
        interpret=interpret,
        name="quantized_matmul",
    )(arrays)
    product = jnp.sum(sums, axis=0)[:rows].astype(call.x.dtype)
    return product.reshape(*call.x.shape[:-1], outputs)


def _kernel(sizes: _BlockSizes, arrays: _ProgramArrays, sums: Ref) -> None:
    """Compute the products of all vectors with a chunk of the codes of some outputs."""
    pl, triton = pallas_and_triton()
    (padded_rows, code_bytes), (all_outputs, groups) = arrays.parts[0].shape, arrays.scales.shape
    outputs = PaddedSpan(pl.program_id(0) * sizes.outputs, sizes.outputs, all_outputs)
    rows, chunk = full_span(padded_rows), pl.program_id(1)
    blocks = code_bytes // sizes.block

    def add_block(number: Array, total: Array) -> Array:
        columns = PaddedSpan(number * sizes.block, sizes.block, code_bytes)
        group = PaddedSpan(number * sizes.block // (code_bytes // groups), 1, groups)
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
