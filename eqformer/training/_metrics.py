"""Bits per byte, tokens a second and MFU, from a step's loss and time."""

import math


def bits_per_byte(nats_per_token: float, bytes_per_token: float = 1.0) -> float:
    """`nats / ln 2 / bytes`: the compression rate in bits per byte of text, comparable between tokenizers."""
    if not bytes_per_token > 0:
        raise ValueError(f"bits_per_byte(bytes_per_token={bytes_per_token}): a token stands for more than no bytes.")
    return nats_per_token / math.log(2) / bytes_per_token


def throughput(
    tokens: int,
    seconds: float,
    *,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> dict[str, float]:
    """`tokens_per_second` and, given `flops_per_token` and `peak_flops`, `model_flops_per_second` and `mfu`.

    `flops_per_token` counts the model's matrix products, forward and backward, without recomputation; `peak_flops` is
    the FLOP/s of all devices in use, measured or from a data sheet. MFU = tokens/s x FLOPs/token / peak
    (arXiv 2204.02311, appendix B).
    """
    if not seconds > 0:
        raise ValueError(f"throughput(tokens={tokens}, seconds={seconds}): the time must be positive.")
    row = {"tokens_per_second": tokens / seconds}
    if flops_per_token is not None:
        row["model_flops_per_second"] = row["tokens_per_second"] * flops_per_token
        if peak_flops is not None:
            row["mfu"] = row["model_flops_per_second"] / peak_flops
    return row
