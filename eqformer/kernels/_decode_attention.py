"""Attention of each row's newest token to a cache: the definition, and what runs on NVIDIA GPUs, TPUs and CPUs.

The kernels read the cache once. In plain XLA the scores of all slots are in main memory in float32, and a softmax reads
them three times. If many heads share a key head, these scores are much of a decode step's memory traffic: a sixth for
Llama 3 70B on eight devices, where eight heads share one key head on each device. The GPU's kernel (`FlashDecodingGpu`)
keeps scores in registers. On TPUs, XLA read latents twice, because they are both keys and values, and its products of
few queries took longer than reading the cache. The TPU's kernel (`FlashDecodingTpu`) reads the cache where it is
stored. On CPUs (`FilledSlotsDecoding`) the empty slots of a large cache are not read.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._decode_attention_cpu import FilledSlotsDecoding
from ._decode_attention_gpu import FlashDecodingGpu
from ._decode_attention_tpu import FlashDecodingTpu
from ._op import Implementation, Op
from .attention._call import AttentionCall, ChosenKeys, DecodeCall, TokenPositions
from .attention._reference import attend_by_definition


class ReferenceDecoding(Implementation[DecodeCall, Array]):
    """The definition of attention, for keys and values as they are stored."""

    def supports(self, call: DecodeCall) -> str | None:
        """Return None: it computes every call."""
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch seq heads _"]:
        """Compute the call."""
        key, value, value_scales, rotated = call.key, call.value, call.value_scales, call.rotated
        if value is None:
            value, value_scales = key, call.key_scales
        # The mask is a matrix, so the positions of the tokens do not matter.
        no_positions = jnp.zeros((*call.query.shape[:-3], call.query.shape[-3]), jnp.int32)
        attention = AttentionCall(
            call.query,
            key.astype(call.query.dtype),
            value.astype(call.query.dtype),
            mask=ChosenKeys(call.visible),
            tokens=TokenPositions(no_positions),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            bias=call.bias,
        )
        rotated = None if rotated is None else rotated._replace(key=rotated.key.astype(call.query.dtype))
        return attend_by_definition(attention, key_scales=call.key_scales, value_scales=value_scales, rotated=rotated)


DECODE_ATTENTION = Op(
    ReferenceDecoding(),
    (
        ("cuda", FlashDecodingGpu()),
        ("tpu", FlashDecodingTpu()),
        ("cpu", FilledSlotsDecoding(ReferenceDecoding())),
    ),
)
"""Attention to a cache: on GPUs and TPUs by flash-decoding for one query a row in 16 bits, on CPUs by the definition of
the filled slots of a large cache, and otherwise by the definition."""
