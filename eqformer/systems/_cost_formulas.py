"""Cost formulas of the source documents: inference layouts (Pope et al. 2022), feed-forward layers, GPipe.

Traffic is in bytes that one device sends for all tokens of a call. Over `n` devices a gather or a reduce-scatter of `S`
bytes sends `f(n) S`, where `f(n) = (n-1)/n`. The paper on inference layouts (arXiv:2211.05102, section 3.2 and appendix
A) leaves out the factor `f(n)`; these formulas keep it.
"""

import math

from ..planning import gather_bytes


Number = int | float


def weight_stationary_bytes(
    tokens: Number,
    embed: int,
    *,
    widened: int,
    narrowed: int,
    embed_devices: int = 1,
    feature_devices: int = 1,
    activation_bytes: Number = 2,
) -> Number:
    """Return the bytes that a weight-stationary layer sends, with `embed` split over X devices and features over Y.

    In the paper: `2 T (E/X + F/Y) a`. With the factors `f`: `T a (2 f(Y) E/X + f(X) (W + N)/Y)`, where `T` is `tokens`,
    `E` is `embed`, `W` is `widened`, `N` is `narrowed` and `a` is `activation_bytes`. The layer's input is all-gathered
    over Y and its output reduce-scattered over Y; the widened features are reduce-scattered over X and the narrowed
    features all-gathered over X. The widened features of a parallel block are its queries and the outputs of each up
    projection (two if gated); the narrowed features are the attention's outputs and the hidden features.
    `embed_devices=1` is the 1-D layout, `2 T E a` for any number of devices.

    Args:
        tokens: Tokens of the call.
        embed: Channels of a token.
        widened: Output features of the projections from the residual stream.
        narrowed: Input features of the projections to the residual stream.
        embed_devices: X, devices that split `embed`.
        feature_devices: Y, devices that split features.
        activation_bytes: Bytes of one activation.
    """
    stream_entries = 2 * gather_bytes(tokens * embed / embed_devices, feature_devices)
    feature_entries = gather_bytes(tokens * (widened + narrowed) / feature_devices, embed_devices)
    return (stream_entries + feature_entries) * activation_bytes


def attention_exchange_bytes(
    tokens: Number,
    query_embed: int,
    kv_embed: int,
    *,
    over: str,
    embed_devices: int = 1,
    feature_devices: int = 1,
    activation_bytes: Number = 2,
) -> Number:
    """Return the bytes that a weight-stationary layer sends to split attention over rows or heads.

    `"rows"`: two all-to-alls, of the queries and of the results, `2 f(n) T Q/n a`, and a reduce-scatter of each
    device's keys and values, `f(X) T/Y 2 K a`. `"heads"`: an all-reduce of the keys and values of all rows,
    `2 f(X) T 2 K a`. Here `T` is `tokens`, `Q` is `query_embed`, `K` is `kv_embed`, `a` is `activation_bytes` and
    `n = X Y`.

    Args:
        tokens: Tokens of the call.
        query_embed: Query heads times channels of a head.
        kv_embed: Key heads times channels of a head.
        over: `"rows"` or `"heads"`.
        embed_devices: X, devices that split `embed`.
        feature_devices: Y, devices that split features.
        activation_bytes: Bytes of one activation.
    """
    if over not in ("rows", "heads"):
        raise ValueError(f"attention_exchange_bytes(over={over!r}): choose 'rows' or 'heads'.")
    devices, kv_bytes = embed_devices * feature_devices, 2 * kv_embed * activation_bytes
    if over == "heads":
        return 2 * gather_bytes(tokens * kv_bytes, embed_devices)
    exchanged = 2 * gather_bytes(tokens * query_embed / devices * activation_bytes, devices)
    return exchanged + gather_bytes(tokens / feature_devices * kv_bytes, embed_devices)


def weight_gathered_bytes(
    parameters: Number,
    tokens: Number,
    embed: int,
    *,
    gathered: int,
    stationary: int = 1,
    whole: Number = 0,
    sums: int = 1,
    weight_bytes: Number = 2,
    activation_bytes: Number = 2,
) -> Number:
    """Return the bytes that a weight-gathered layer sends on `n` devices, with rows split over `N` of them.

    In the paper: `P N/n b + 2 T/N E a`. With the factors `f`: `f(N) P/M b + 2 f(M) T/N E a`, where the features are
    split over `M = n/N` devices, `P` is `parameters`, `T` is `tokens`, `E` is `embed`, `b` is `weight_bytes` and `a` is
    `activation_bytes`.

    Args:
        parameters: Parameters of a layer.
        tokens: Tokens of the call.
        embed: Channels of a token.
        gathered: N, devices that split rows, and over which weights are all-gathered.
        stationary: M, devices that split features.
        whole: Parameters that are replicated over the M devices (a single key head, norms).
        sums: All-reduces of a layer's output over the M devices: 1 for a parallel block, 2 for a sequential one.
        weight_bytes: Bytes of one parameter.
        activation_bytes: Bytes of one activation.
    """
    weights = gather_bytes(((parameters - whole) / stationary + whole) * weight_bytes, gathered)
    return weights + 2 * sums * gather_bytes(tokens / gathered * embed * activation_bytes, stationary)


def best_embed_devices(devices: int, embed: int, features: int) -> float:
    """Return the best number of the `n` devices to split `embed` over in the 2-D layout: `sqrt(n E/F)`.

    `E` is `embed` and `F` is `features`.
    """
    return math.sqrt(devices * embed / features)


def best_gathered(
    parameters: Number,
    tokens: Number,
    embed: int,
    devices: int,
    *,
    weight_bytes: Number = 2,
    activation_bytes: Number = 2,
) -> float:
    """Return the best number of devices to gather weights over: `sqrt(2 T E n a / (P b))`.

    With `P = 2 E F` and `a = b`, the number is `sqrt(T n/F)`. If the number is below 1, do not gather weights. If the
    number is above `devices`, gather weights over all devices.

    Args:
        parameters: Parameters of a layer.
        tokens: Tokens of the call.
        embed: Channels of a token.
        devices: The number of devices.
        weight_bytes: Bytes of one parameter.
        activation_bytes: Bytes of one activation.
    """
    return math.sqrt(2 * tokens * embed * devices * activation_bytes / (parameters * weight_bytes))


def transfer_seconds(sent: Number, gigabits: Number, *, gigabit: int = 10**9) -> Number:
    """Return the seconds that `sent` bytes take on a link of `gigabits` per second, of `gigabit` bits each."""
    return 8 * sent / (gigabits * gigabit)


def ffn_gradient_bytes(embed: int, hidden: int, *, gradient_bytes: Number = 4) -> Number:
    """Return the bytes of the gradients that data parallelism all-reduces for a feed-forward layer: `2 E H b`.

    `E` is `embed`, `H` is `hidden` and `b` is `gradient_bytes`.
    """
    return 2 * embed * hidden * gradient_bytes


def ffn_activation_bytes(batch: int, embed: int, *, activation_bytes: Number = 4) -> Number:
    """Return the bytes of the output that tensor parallelism all-reduces for a feed-forward layer: `B E a`.

    `B` is `batch`, `E` is `embed` and `a` is `activation_bytes`.
    """
    return batch * embed * activation_bytes


def gpipe_idle_share(stages: int, microbatches: int) -> Number:
    """Return the share of time that a device is idle under GPipe: `(p-1)/(m+p-1)` (arXiv:1811.06965).

    `p` is `stages` and `m` is `microbatches`.
    """
    return (stages - 1) / (microbatches + stages - 1)


def gpipe_activations(batch: Number, layers: int, stages: int, microbatches: int, *, recompute: bool = True) -> Number:
    """Return the largest number of pairs of a row and a layer whose activations a device keeps under GPipe.

    With recomputation it is `B + L/p B/m`: a device keeps the inputs of its stage for the whole batch, and the inputs
    of each of its layers for one microbatch. Without recomputation it is `B L/p`. `B` is `batch`, `L` is `layers`, `p`
    is `stages` and `m` is `microbatches`.
    """
    depth = layers / stages
    return batch + depth * batch / microbatches if recompute else batch * depth
