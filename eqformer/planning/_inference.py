"""What a layer sends for text in the layouts of "Efficiently Scaling Transformer Inference" (Pope et al. 2022).

In bytes sent by one device, as in `_bounds`; divide by the tokens for bytes a token. The paper (arXiv:2211.05102,
section 3.2 and appendix A) leaves out `f(n) = (n-1)/n`, which these keep.
"""

import math

from ._bounds import gather_bytes, Number


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
    """Bytes a layer whose weights stay, `embed` split over X devices and features over Y: `2 T (E/X + F/Y) a`.

    More exactly `T a (2 f(Y) E/X + f(X) (F_in + F_out)/Y)`: the input is gathered over Y and the output scattered
    there, `widened` features are scattered over X and `narrowed` ones gathered. A parallel block widens to its
    queries and every map of its feed-forward layer (gated: two) and narrows from queries' and hidden features.
    `embed_devices=1` is the 1-D layout, `2 T E a`, the same however many devices there are.

    Args:
        tokens: Tokens of the call.
        embed: Channels of a token.
        widened: Features that a layer widens to.
        narrowed: Features that it narrows from.
        embed_devices: X, devices that split `embed`.
        feature_devices: Y, devices that split features.
        activation_bytes: The bytes of an activation.
    """
    of_stream = 2 * gather_bytes(tokens * embed / embed_devices, feature_devices)
    of_features = gather_bytes(tokens * (widened + narrowed) / feature_devices, embed_devices)
    return (of_stream + of_features) * activation_bytes


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
    """Bytes a weight-stationary layer sends so that attention is split `over` rows or heads.

    `"rows"`: queries change hands by an all-to-all and so do results, `2 f(n) T A/n a`, and each device's rows get
    their keys and values, `f(X) T/Y 2 K a`. `"heads"`: keys and values of all rows are summed whole, `2 f(X) T 2 K a`.
    `query_embed` (A) is heads times head dim, `kv_embed` (K) that of keys, `n = X Y`.

    Args:
        tokens: Tokens of the call.
        query_embed: Heads of queries times their channels.
        kv_embed: Heads of keys times their channels.
        over: `"rows"` or `"heads"`.
        embed_devices: X, devices that split `embed`.
        feature_devices: Y, devices that split features.
        activation_bytes: The bytes of an activation.
    """
    if over not in ("rows", "heads"):
        raise ValueError(f"attention_exchange_bytes(over={over!r}): choose 'rows' or 'heads'.")
    devices, keys = embed_devices * feature_devices, 2 * kv_embed * activation_bytes
    if over == "heads":
        return 2 * gather_bytes(tokens * keys, embed_devices)
    exchanged = 2 * gather_bytes(tokens * query_embed / devices * activation_bytes, devices)
    return exchanged + gather_bytes(tokens / feature_devices * keys, embed_devices)


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
    """Bytes a layer whose weights are gathered over N devices, which split the rows: `P N/n b + 2 T/N E a`.

    More exactly `f(N) P/M b + 2 f(M) T/N E a`, where `stationary` (M = n/N) devices keep features apart; `whole` of the
    parameters are not split among these (the single key head, norms). `sums` is how often a layer's outputs are added
    up over them: a parallel block needs it once, but twice if each of its layers does so.

    Args:
        parameters: Those of a layer.
        tokens: Tokens of the call.
        embed: Channels of a token.
        gathered: N, devices that gather each other's weights.
        stationary: M, devices that keep features apart.
        whole: The parameters that are not split among these.
        sums: How often a layer's outputs are added up over them.
        weight_bytes: The bytes of a parameter.
        activation_bytes: The bytes of an activation.
    """
    weights = gather_bytes(((parameters - whole) / stationary + whole) * weight_bytes, gathered)
    return weights + 2 * sums * gather_bytes(tokens / gathered * embed * activation_bytes, stationary)


def best_embed_devices(devices: int, embed: int, features: int) -> float:
    """Over how many of `devices` to split `embed` in the 2-D layout: `sqrt(n E/F)`, or `sqrt(n)/2` with `F = 4 E`."""
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
    """Over how many of `devices` to gather weights: `sqrt(2 T E n a / (P b))`, with `P = 2 E F` that is `sqrt(T n/F)`.

    Below 1 they should stay, above `devices` all be gathered.

    Args:
        parameters: Those of a layer.
        tokens: Tokens of the call.
        embed: Channels of a token.
        devices: All devices.
        weight_bytes: The bytes of a parameter.
        activation_bytes: The bytes of an activation.
    """
    return math.sqrt(2 * tokens * embed * devices * activation_bytes / (parameters * weight_bytes))
