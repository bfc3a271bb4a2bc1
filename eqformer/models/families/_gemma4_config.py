"""The config of Gemma 4, and what its layers are to each other."""

import dataclasses
from typing import Any, NamedTuple

from ...nn import ProportionalScaling, RotaryScaling
from .._family import DecoderConfig
from .._kinds import Index, Length, NotNegative, OptionalSize, Positive, Size
from ._pattern import windows_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """The config of a Gemma 4; `head_dim` and `kv_heads` are those of layers with a window."""

    window_layers: tuple[Index, ...]
    """The numbers of the layers that see a `window`; the others see everything."""
    window: Length = 512
    """The tokens that the layers of `window_layers` see."""
    head_dim: Size = 256
    activation: str = "gelu_tanh"
    global_head_dim: Size = 512
    """Channels of a head in the other layers."""
    global_kv_heads: Size
    """Heads of keys and values there."""
    keys_as_values: bool = False
    """Whether values are keys there."""
    theta: Positive = 1_000_000.0
    scaling: RotaryScaling | None = ProportionalScaling(0.25)
    local_theta: Positive = 10_000.0
    """The base of rotary positions in the layers of `window_layers`; the others have the `scaling`."""
    local_scaling: RotaryScaling | None = None
    """Their scaling."""
    logit_softcap: Positive | None = None
    """The bound of logits."""
    bias: bool = False
    """Whether the attention's projections have biases."""
    experts: OptionalSize = 0
    """Experts of a layer, beside its dense one; 0: none."""
    top_k: Size = 1
    """Experts of a token."""
    expert_mlp: Size = 1
    """Hidden features of an expert."""
    balance: NotNegative = 0.001
    """The weight of `LoadBalance`, over the batch."""
    reading_layers: OptionalSize = 0
    """The last layers, which read the keys and values of the last layer of their kind before them."""
    widens_reading: bool = False
    """Whether these have twice as many hidden features."""
    input_mlp: OptionalSize = 0
    """Channels of a vector of each token for each layer; 0: none."""
    input_vocab: Size = 262_144
    """Ids that have such vectors."""
    tied: bool = True
    max_seq: Length = 262_144


class Kind(NamedTuple):
    """What a layer is: its window, and under which names it leaves or reads keys and values."""

    window: int | None
    leaves: str | None = None
    reads: str | None = None


def kinds_of(config: Gemma4Config) -> list[Kind]:
    """Of each layer its kind; raises a `ValueError` where layers would read keys that none before them has."""
    windows, own = windows_of(config), config.layers - config.reading_layers
    names = ["global" if window is None else "window" for window in windows]
    if missing := {*names[own:]} - {*names[:own]}:
        raise ValueError(
            f"Gemma4Config(layers={config.layers}, reading_layers={config.reading_layers}): later layers read keys of "
            f"{' and '.join(sorted(missing))} ones, and the first {max(own, 0)} have none; let fewer read."
        )
    last = {name: layer for layer, name in enumerate(names[:own])} if config.reading_layers else {}
    kinds = [
        Kind(window, leaves=name if last.get(name) == layer and name in names[own:] else None)
        for layer, (window, name) in enumerate(zip(windows[:own], names[:own]))
    ]
    return kinds + [Kind(window, reads=name) for window, name in zip(windows[own:], names[own:])]


def unread(config: Any) -> tuple[str, ...]:
    """How names begin of arrays that are published of layers which read others' keys, and that nothing reads."""
    layers = range(config.layers - config.reading_layers, config.layers)
    return tuple(f"model.layers.{layer}.self_attn.{part}_" for layer in layers for part in "kv")
