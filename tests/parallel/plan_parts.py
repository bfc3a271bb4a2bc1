"""Sizes and parts that the blocks for the tests of plans have in common."""

from typing import Any

from eqformer import kernels, nn


CORE = kernels.BlockwiseAttention(block=8)
EMBED, HEADS, HEAD_DIM, MLP = 32, 8, 4, 48


def attention(key: Any, **options: Any) -> nn.Attention:
    """Return attention of the sizes above with rotary positions."""
    rotary = nn.Rotary(HEAD_DIM, 1e4)
    options = {"kv_heads": 4, "core": CORE, "rotary": rotary, **options}
    return nn.Attention(embed=EMBED, heads=HEADS, head_dim=HEAD_DIM, key=key, **options)


def norm(offset: float = 0.0) -> nn.RMSNorm:
    """Return a norm of the residual stream."""
    return nn.RMSNorm("embed", embed=EMBED, offset=offset)
