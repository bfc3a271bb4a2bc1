"""Attention on NVIDIA GPUs: cuDNN's fused kernels, as JAX calls them in `jax.nn.dot_product_attention`.

That function keeps no statistics for remat policies, asks the machine that traces a program for its GPU, and has no
place for packed documents. So its two primitives are bound here, and differentiated by [`_fused.py`](_fused.py).
"""

import inspect
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._pallas import gpu_capability
from ._kernel import Call, Kernel, Places


class CudnnKernel(Kernel):
    """cuDNN's fused attention: causal by name, windows, and packed documents by the places where they begin."""

    platform = "cuda"

    def refusal(self, call: Call, query: Array, key: Array, value: Array) -> str | None:
        """Why it cannot compute a call, or None."""
        widths, hopper = {query.shape[-1], value.shape[-1]}, gpu_capability() >= 9
        widest = 256 if hopper else 128
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {query.dtype}"
        if max(widths) > widest or any(width % 8 for width in widths):
            return f"it takes heads of up to {widest} channels in eights, not {query.shape[-1]} and {value.shape[-1]}"
        if len(widths) > 1 and not hopper:
            return "values as wide as the keys alone run on GPUs before Hopper"
        if call.softcap is not None:
            return "it has no softcap"
        if call.rows.window is not None and not call.rows.is_causal:
            return "it has windows under a causal mask alone"
        if call.rows.piece is not None and (call.rows.window, call.rows.documents) != (None, None):
            return "it has no windows and no packed documents over pieces of rows"
        documents = call.rows.documents
        if documents is not None and not hopper:
            return "packed documents need a Hopper GPU or a later one"
        if documents is not None and documents > query.shape[-1]:
            return (
                f"its statistics of up to {documents} documents a row would take more memory than the queries; it "
                f"takes up to {query.shape[-1]}"
            )
        return None

    def forward(
        self,
        call: Call,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_seq kv_heads head_dim"],
        value: Float[Array, "batch kv_seq kv_heads v_dim"],
        places: Places,
        kv_places: Places,
    ) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
        """The attended values and the logarithm of each row's sum of exponentials."""
        cudnn = _cudnn()
        if call.rows.documents is None:
            given = _settings(call, cudnn, "wrapper") | {"is_training": True}
            lengths = _lengths(call, places, query)
            return tuple(cudnn._dot_product_attention_fwd_p_wrapper.bind(query, key, value, *lengths, **given))
        packed = _packed(call.rows.documents, places)
        given = _settings(call, cudnn, "inner") | {"is_training": True}
        arrays = query, key, value, *packed.arguments(query, key)
        output, statistics = cudnn._dot_product_attention_fwd_p.bind(*arrays, **given)
        logsum = statistics[packed.documents, :, jnp.maximum(places.positions, 0)].swapaxes(1, 2)
        return packed.real(output), jnp.where(packed.is_real[:, None], logsum, 0)

    def backward(
        self,
        call: Call,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_seq kv_heads head_dim"],
        value: Float[Array, "batch kv_seq kv_heads v_dim"],
        places: Places,
        kv_places: Places,
        output: Float[Array, "batch seq heads v_dim"],
        logsum: Float[Array, "batch heads seq"],
        to_output: Float[Array, "batch seq heads v_dim"],
    ) -> tuple[
        Float[Array, "batch seq heads head_dim"],
        Float[Array, "batch kv_seq kv_heads head_dim"],
        Float[Array, "batch kv_seq kv_heads v_dim"],
    ]:
        """The gradients of query, key and value."""
        cudnn, results = _cudnn(), (output, to_output)
        if call.rows.documents is None:
            given = _settings(call, cudnn, "wrapper")
            arrays = query, key, value, *_lengths(call, places, query), logsum, *results
            return tuple(cudnn._dot_product_attention_bwd_p_wrapper.bind(*arrays, **given))
        packed = _packed(call.rows.documents, places)
        batch, seq, heads, _ = query.shape
        slots = jnp.where(packed.is_real, packed.documents, batch * call.rows.documents)  # padding has none
        empty = jnp.zeros_like(logsum, shape=(batch * call.rows.documents, heads, seq))
        statistics = empty.at[slots, :, jnp.maximum(places.positions, 0)].set(logsum.swapaxes(1, 2), mode="drop")
        arrays = query, key, value, *packed.arguments(query, key), statistics, *results
        gradients = cudnn._dot_product_attention_bwd_p.bind(*arrays, **_settings(call, cudnn, "inner"))
        to_query, to_key, to_value = (packed.real(x) for x in gradients)
        return to_query, to_key, to_value


class _Packed(NamedTuple):
    """Packed rows as cuDNN reads them: the documents of all rows one after another, then empty ones."""

    is_real: Array  # batch seq: not padding
    documents: Array  # batch seq: the number of each token's document over all rows
    sizes: Array  # batch documents: the tokens of each document, in the order of `documents`
    starts: Array  # batch documents+1: the place of each one's first token over all rows

    def arguments(self, query: Array, key: Array) -> tuple[Array, ...]:
        """What stands between the arrays and the statistics: no bias, sizes and places, no pages."""
        nothing = jnp.zeros_like(query, shape=(0,))
        places = (self.starts * (x.shape[-2] * x.shape[-1]) for x in (query, key))
        return nothing, self.sizes, self.sizes, *places, nothing, nothing

    def real(self, x: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
        """Zeros for padding, of which the kernel writes nothing."""
        return jnp.where(self.is_real[..., None, None], x, jnp.zeros_like(x))


def _packed(documents: int, places: Places) -> _Packed:
    positions = places.positions
    rows, seq = positions.shape
    is_real, is_first = (positions >= 0).reshape(-1), (positions == 0).reshape(-1)
    starts = jnp.nonzero(is_first, size=rows * documents, fill_value=rows * seq)[0].astype(jnp.int32)
    before = jnp.concatenate([jnp.zeros_like(starts[:1]), jnp.cumsum(is_real, dtype=jnp.int32)])
    after = jnp.concatenate([starts[1:], jnp.full_like(starts[:1], rows * seq)])
    sizes = before[after] - before[starts]
    filled = jnp.concatenate([starts, jnp.full_like(starts, rows * seq, shape=(rows,))])
    number = jnp.maximum(jnp.cumsum(is_first, dtype=jnp.int32) - 1, 0)
    shaped = lambda x: x.reshape(rows, -1)
    return _Packed(shaped(is_real), shaped(number), shaped(sizes), shaped(filled))


def _lengths(call: Call, places: Places, query: Array) -> tuple[Array, ...]:
    """Of rows of one document: their lengths, where no causal order hides the padding."""
    nothing = jnp.zeros_like(query, shape=(0,))
    if call.rows.is_causal:
        return (nothing,) * 7
    sizes = jnp.maximum(jnp.sum(places.positions >= 0, axis=-1, dtype=jnp.int32), 1)
    return nothing, sizes, sizes, nothing, nothing, nothing, nothing


def _settings(call: Call, cudnn: Any, primitive: str) -> dict[str, Any]:
    """The parameters of JAX's primitives, of which newer ones have more."""
    kinds = cudnn.MaskType
    if call.rows.piece == "past":
        mask = kinds.NO_MASK
    elif call.rows.documents is not None:
        mask = kinds.PADDING_CAUSAL if call.rows.is_causal else kinds.PADDING
    else:
        mask = kinds.CAUSAL if call.rows.is_causal else kinds.PADDING
    given = {"scale": call.scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False)}
    given |= {"mask_type": mask, "layout": cudnn.AttentionLayout.BTNH.value}
    given |= {"sliding_window_length": call.rows.window}
    if "score_mod_name" in inspect.signature(cudnn._dot_product_attention_fwd_cuda_lowering).parameters:
        given |= {"score_mod": None} if primitive == "wrapper" else {"score_mod_name": None, "score_mod_jaxpr": None}
    return given


def _cudnn() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
