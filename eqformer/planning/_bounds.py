"""Lower bounds of the bytes that one device sends for each way to split a model, as closed formulas.

Rings are optimal in bandwidth (Patarasuk and Yuan 2009): to gather or to reduce-scatter `S` bytes over `n` devices,
each device sends `(n-1)/n S` bytes; to all-reduce `S` bytes, it sends twice as many. `program.list_transfers` counts
the bytes that a given program sends. In formulas, `T`, `h`, `h_kv` and `a` are the arguments `tokens`, `embed`,
`kv_embed` and `activation_bytes`.
"""

Number = int | float


def gather_bytes(size: Number, devices: int) -> Number:
    """Return the bytes that a device sends to gather or reduce-scatter `size` bytes; an all-reduce sends twice that."""
    return (devices - 1) / devices * size


def sharded_state_bytes(
    parameters: Number,
    devices: int,
    *,
    zero: int,
    microbatches: int = 1,
    gathers: int = 2,
    replicas: int = 1,
    weight_bytes: Number = 2,
    gradient_bytes: Number = 2,
) -> Number:
    """Return the bytes per step of data parallelism, with the training state replicated (`zero=0`) or split (1 to 3).

    ZeRO (arXiv:1910.02054) sends these bytes, for `n` devices, `P` parameters, `G` microbatches, `b_w` bytes of a
    parameter, `b_g` bytes of a gradient, and `f = (n-1)/n`:

    - stage 0, plain data parallelism: `2 f P b_g`;
    - stage 1: `f P (b_g + b_w)`;
    - stage 2, which scatters the gradients of each microbatch: `f P (G b_g + b_w)`;
    - stage 3, which gathers the parameters in both passes of each microbatch: `f P G (2 b_w + b_g)`. `gathers` replaces
      the 2; it is 3 in a pipeline whose stages recompute their forward pass.

    With several `replicas` of the group of devices (HSDP), an all-reduce of each device's share of the gradients is
    added, once a step.

    Args:
        parameters: Number of parameters.
        devices: Devices of a group.
        zero: State that is split: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters.
        microbatches: Microbatches of a step.
        gathers: How often a microbatch gathers parameters.
        replicas: Groups with the same state.
        weight_bytes: The bytes of a parameter.
        gradient_bytes: The bytes of a gradient.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"sharded_state_bytes(zero={zero}): the stages are 0, 1, 2 and 3.")
    sent_per_parameter = {
        0: 2 * gradient_bytes,
        1: gradient_bytes + weight_bytes,
        2: microbatches * gradient_bytes + weight_bytes,
        3: microbatches * (gathers * weight_bytes + gradient_bytes),
    }[zero]
    share = parameters if zero == 0 else parameters / devices
    return gather_bytes(parameters * sent_per_parameter, devices) + 2 * gather_bytes(share * gradient_bytes, replicas)


def tensor_bytes(
    tokens: Number, embed: int, devices: int, *, regathered: bool = False, activation_bytes: Number = 2
) -> Number:
    """Return the bytes per layer and microbatch of tensor parallelism over `t` devices: `8 (t-1)/t T h a`.

    Attention and MLP each gather and scatter the residual stream once in each pass, which costs as much as four
    all-reduces. With `regathered` the factor is 10, not 8: inputs are not saved but gathered again for the gradients of
    weights, as in Megatron with sequence parallelism (arXiv:2205.05198) and in the rings of `all_gather_matmul`.
    """
    return gather_bytes((10 if regathered else 8) * tokens * embed * activation_bytes, devices)


def pipeline_bytes(
    tokens: Number, embed: int, microbatches: Number, *, chunks: int = 1, tensor: int = 1, activation_bytes: Number = 2
) -> Number:
    """Return the bytes per step of an inner pipeline stage: `2 m v T h a` for `m` microbatches and `v` chunks.

    Args:
        tokens: Tokens of a microbatch.
        embed: Channels of a token.
        microbatches: Microbatches of a step.
        chunks: Parts of the model on a device.
        tensor: Devices that each send a slice of the activations; the bytes are divided by this number.
        activation_bytes: The bytes of an activation.
    """
    return 2 * microbatches * chunks * tokens * embed * activation_bytes / tensor


def context_bytes(
    tokens: Number,
    kv_embed: Number,
    devices: int,
    *,
    method: str,
    embed: Number = 0,
    saved: bool = False,
    activation_bytes: Number = 2,
) -> Number:
    """Return the bytes per layer and microbatch of context parallelism, which splits the tokens over `devices`.

    - `"ring"` and `"gather"` send keys and values in the forward pass, and again in the backward pass with their
      gradients: `6 (c-1)/c T h_kv a`. The factor is 4 if gathered keys and values are `saved` for the backward pass.
    - `"heads"` (Ulysses, arXiv:2309.14509) exchanges queries, keys, values and outputs in both passes:
      `2 (c-1)/c T/c (2 h + 2 h_kv) a`.

    `c` is the number of `devices`.

    Args:
        tokens: Tokens of a microbatch on all `devices` together.
        kv_embed: Number of key heads times the channels of a head.
        devices: Number of devices that the tokens of a row are split over.
        method: `"ring"`, `"gather"` or `"heads"`.
        embed: Number of query heads times the channels of a head; needed for `"heads"` only.
        saved: Whether gathered keys and values are kept for the backward pass.
        activation_bytes: The bytes of an activation.
    """
    if method not in ("ring", "gather", "heads"):
        raise ValueError(f"context_bytes(method={method!r}): choose 'ring', 'gather' or 'heads'.")
    if method == "heads":
        if not embed:
            raise ValueError("context_bytes(method='heads'): queries are sent too; give embed=heads * head_dim.")
        return gather_bytes(2 * tokens / devices * (2 * embed + 2 * kv_embed) * activation_bytes, devices)
    if saved and method == "ring":
        raise ValueError("context_bytes(method='ring', saved=True): a ring holds no gathered keys; use 'gather'.")
    return gather_bytes((4 if saved else 6) * tokens * kv_embed * activation_bytes, devices)


def expert_bytes(
    tokens: Number,
    embed: int,
    devices: int,
    *,
    top_k: int,
    method: str,
    factor: Number = 1,
    activation_bytes: Number = 2,
) -> Number:
    """Return the bytes per layer and microbatch of expert parallelism over `devices`, each with its own `tokens`.

    - `"exchange"` sends each token to the devices of its `k` experts, and the outputs back, in both passes:
      `4 f k (n-1)/n T h a`. The capacity factor `f` is the number of buffer slots for each pair of a token and one of
      its experts (GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596).
    - `"gather"` sends all tokens to all devices, and the sums of outputs back: `4 (n-1) T h a`, which is less if
      `f k > n`.

    `n` is the number of `devices`.

    Args:
        tokens: Tokens of each device.
        embed: Channels of a token.
        devices: Devices that the experts are split over.
        top_k: Number of experts that a token takes, `k`.
        method: `"exchange"` or `"gather"`.
        factor: The capacity factor `f`.
        activation_bytes: The bytes of an activation.
    """
    if method not in ("exchange", "gather"):
        raise ValueError(f"expert_bytes(method={method!r}): choose 'exchange' or 'gather'.")
    times = factor * top_k if method == "exchange" else devices
    return gather_bytes(4 * times * tokens * embed * activation_bytes, devices)
