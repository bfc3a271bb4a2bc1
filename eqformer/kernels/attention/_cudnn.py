"""Attention on NVIDIA GPUs: cuDNN's fused kernels, as JAX calls them in `jax.nn.dot_product_attention`.

JAX's function has three gaps: it does not expose the logsumexp of each query's scores to remat policies, it asks the
machine that traces a program for its GPU, and it has no argument for packed documents. So this file calls its two
primitives directly.
"""

import inspect
from types import ModuleType
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._mask import Mask
from .._platform import gpu_capability
from ._call import AttentionCall, TokenPositions
from ._flash import FlashAttention, Gradients, LogSum, Output


class CudnnAttention(FlashAttention):
    """cuDNN's fused attention, with causal masks, windows, and documents that are packed one after another.

    On compute capability 9.0 (H100 and H200), cuDNN is the fastest kernel that was measured here. On A100 (8.0), A10G
    (8.6) and RTX Blackwell (12.0), others measured that cuDNN takes 7 to 22 % longer than flash-type kernels in
    PyTorch. This package has no such kernel for these GPUs, and its loop over blocks in plain XLA is slower than cuDNN,
    so cuDNN is chosen there too. `capabilities` limits cuDNN to some GPUs: with `CudnnAttention(capabilities=(9.0,))`,
    an op takes its next implementation on all other GPUs.
    """

    capabilities: tuple[float, ...] | None = eqx.field(static=True, default=None)

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why cuDNN cannot compute the call, or is not used for it, or None."""
        query, value, mask, documents = call.query, call.value, call.mask, call.documents
        capability, widths = gpu_capability(), {query.shape[-1], value.shape[-1]}
        is_hopper = capability >= 9
        widest = 256 if is_hopper else 128
        if self.capabilities is not None and capability not in self.capabilities:
            known = ", ".join(map(str, self.capabilities))
            return f"it is limited to GPUs of compute capability {known}, not {capability}"
        if call.has_bias:
            return "it supports no score bias"
        if (reason := call.unknown_rows) is not None:
            return reason
        assert isinstance(mask, Mask)
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {query.dtype}"
        if max(widths) > widest or any(width % 8 for width in widths):
            return (
                f"it takes heads of up to {widest} channels, in multiples of 8, not {query.shape[-1]} and "
                f"{value.shape[-1]}"
            )
        if len(widths) > 1 and not is_hopper:
            return "on GPUs before Hopper it takes only values as wide as the keys"
        if call.softcap is not None:
            return "it has no softcap"
        if mask.window is not None and not mask.is_causal:
            return "it takes windows only under a causal mask"
        if call.piece is not None and (mask.window, documents) != (None, None):
            return "it has no windows and no packed documents if devices split rows"
        if documents is not None and not is_hopper:
            return "packed documents need a Hopper GPU or a later one"
        if documents is not None and documents > query.shape[-1]:
            return (
                f"its statistics of up to {documents} documents a row would take more memory than the queries; it "
                f"takes up to {query.shape[-1]} documents a row"
            )
        return None

    def forward(self, call: AttentionCall) -> tuple[Output, LogSum]:
        """Return the output and the logsumexp of each query's scores."""
        cudnn, query, key, value = _cudnn(), call.query, call.key, call.value
        if call.documents is None:
            settings = _settings(call, "wrapper") | {"is_training": True}
            arrays = query, key, value, *_lengths(call)
            return tuple(cudnn._dot_product_attention_fwd_p_wrapper.bind(*arrays, **settings))
        packed = _pack_documents(call.documents, call.tokens)
        settings = _settings(call, "inner") | {"is_training": True}
        arrays = query, key, value, *packed.arguments(query, key)
        output, statistics = cudnn._dot_product_attention_fwd_p.bind(*arrays, **settings)
        logsum = statistics[packed.documents, :, jnp.maximum(call.tokens.positions, 0)].swapaxes(1, 2)
        return packed.without_padding(output), jnp.where(packed.is_real[:, None], logsum, 0)

    def backward(self, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output) -> Gradients:
        """Return the gradients of query, key and value."""
        cudnn, query, key, value = _cudnn(), call.query, call.key, call.value
        results = output, output_grad
        if call.documents is None:
            settings = _settings(call, "wrapper")
            arrays = query, key, value, *_lengths(call), logsum, *results
            return tuple(cudnn._dot_product_attention_bwd_p_wrapper.bind(*arrays, **settings))
        packed = _pack_documents(call.documents, call.tokens)
        batch, seq, heads, _ = query.shape
        rows = batch * call.documents
        slots = jnp.where(packed.is_real, packed.documents, rows)  # an index out of bounds, so that padding is dropped
        statistics = jnp.zeros_like(logsum, shape=(rows, heads, seq))
        positions = jnp.maximum(call.tokens.positions, 0)
        statistics = statistics.at[slots, :, positions].set(logsum.swapaxes(1, 2), mode="drop")
        arrays = query, key, value, *packed.arguments(query, key), statistics, *results
        gradients = cudnn._dot_product_attention_bwd_p.bind(*arrays, **_settings(call, "inner"))
        query_grad, key_grad, value_grad = (packed.without_padding(x) for x in gradients)
        return query_grad, key_grad, value_grad


class _PackedDocuments(NamedTuple):
    """Packed rows as cuDNN reads them: the documents of all rows, one after another, then empty documents."""

    is_real: Array
    """Whether each token is not padding, `batch seq`."""
    documents: Array
    """Index of each token's document, counted over all rows, `batch seq`."""
    sizes: Array
    """Number of tokens of each document, `batch documents`."""
    starts: Array
    """Index of each document's first token, counted over all rows, `batch documents+1`."""

    def arguments(self, query: Array, key: Array) -> tuple[Array, ...]:
        """Return the primitives' arguments after `value`: bias (empty), sizes, offsets, two page tables (empty)."""
        empty = jnp.zeros_like(query, shape=(0,))
        offsets = (self.starts * (x.shape[-2] * x.shape[-1]) for x in (query, key))
        return empty, self.sizes, self.sizes, *offsets, empty, empty

    def without_padding(self, x: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
        """Return the array with zeros for padding, where the kernel writes nothing."""
        return jnp.where(self.is_real[..., None, None], x, jnp.zeros_like(x))


def _pack_documents(documents: int, tokens: TokenPositions) -> _PackedDocuments:
    positions = tokens.positions
    rows, seq = positions.shape
    is_real, is_first = (positions >= 0).reshape(-1), (positions == 0).reshape(-1)
    starts = jnp.nonzero(is_first, size=rows * documents, fill_value=rows * seq)[0].astype(jnp.int32)
    real_before = jnp.concatenate([jnp.zeros_like(starts[:1]), jnp.cumsum(is_real, dtype=jnp.int32)])
    ends = jnp.concatenate([starts[1:], jnp.full_like(starts[:1], rows * seq)])
    sizes = real_before[ends] - real_before[starts]
    filled = jnp.concatenate([starts, jnp.full_like(starts, rows * seq, shape=(rows,))])
    document = jnp.maximum(jnp.cumsum(is_first, dtype=jnp.int32) - 1, 0)
    return _PackedDocuments(*(x.reshape(rows, -1) for x in (is_real, document, sizes, filled)))


def _lengths(call: AttentionCall) -> tuple[Array, ...]:
    """Return the primitives' arguments that follow query, key and value, for rows of one document.

    These arguments include the lengths of the rows, except under a causal mask, which already hides the padding at the
    end.
    """
    empty = jnp.zeros_like(call.query, shape=(0,))
    if call.mask.is_causal:
        return (empty,) * 7
    sizes = jnp.maximum(jnp.sum(call.tokens.positions >= 0, axis=-1, dtype=jnp.int32), 1)
    return empty, sizes, sizes, empty, empty, empty, empty


def _settings(call: AttentionCall, primitive: str) -> dict[str, object]:
    """Return the parameters of the forward or backward primitive of this version of JAX.

    `primitive` is "wrapper" or "inner"; newer versions of JAX name some parameters differently in these two primitives.
    """
    cudnn = _cudnn()
    kinds = cudnn.MaskType
    if call.piece == "past":
        mask = kinds.NO_MASK
    elif call.documents is not None:
        mask = kinds.PADDING_CAUSAL if call.mask.is_causal else kinds.PADDING
    else:
        mask = kinds.CAUSAL if call.mask.is_causal else kinds.PADDING
    settings = {"scale": call.scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False)}
    settings |= {"mask_type": mask, "layout": cudnn.AttentionLayout.BTNH.value}
    settings |= {"sliding_window_length": call.mask.window}
    if "score_mod_name" in inspect.signature(cudnn._dot_product_attention_fwd_cuda_lowering).parameters:
        settings |= {"score_mod": None} if primitive == "wrapper" else {"score_mod_name": None, "score_mod_jaxpr": None}
    return settings


def _cudnn() -> ModuleType:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
