"""Config fields, the mixer and tables that families with Mamba-2 share."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated

from jaxtyping import Array, Key

from ... import nn
from ..._files import fits
from .._attributes import Attribute, Count, Entry, Fields
from .._config_types import Attributes, NotNegative, Positive, PublishedConfig, Range, Size
from .._family import ModelConfig
from .._weight_rules import Rule
from ._common import leaf_paths


STEP_LIMITS = tuple[NotNegative, Annotated[float, Range(0.0, math.inf)]]  # least and greatest, which may be infinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetSizes(ModelConfig):
    """Base class of configs with a `Mamba2Mixer`."""

    net_heads: Size
    """Value heads."""
    net_kv_heads: Size = 1
    """Key and query heads, which Mamba calls groups."""
    net_head_dim: Size = 128
    """Channels of a key or query head: the size of the state."""
    net_v_dim: Size = 64
    """Channels of a value head."""
    taps: Size = 4
    """The number of tokens that the convolutions read."""
    net_bias: bool = False
    """Whether the maps have biases."""
    conv_bias: bool = True
    """Whether the convolutions have biases."""
    step_limits: STEP_LIMITS = (0.0, math.inf)
    """The least and the greatest step."""

    @property
    def net_width(self) -> int:
        """Channels of all value heads."""
        return self.net_heads * self.net_v_dim


def mamba2(
    config: NetSizes,
    *,
    activation: Callable[[Array], Array],
    gate_norm: nn.GateNorm | None,
    output_std: float | None,
    output_bias: bool | None = None,
    multipliers: tuple[float, float, float, float, float] | None = None,
    key: Key[Array, ""],
) -> nn.Mamba2Mixer:
    """Return a `Mamba2Mixer` of the config's sizes; the other arguments are those of `Mamba2Mixer`."""
    return nn.Mamba2Mixer(
        embed=config.embed,
        heads=config.net_heads,
        kv_heads=config.net_kv_heads,
        head_dim=config.net_head_dim,
        v_dim=config.net_v_dim,
        taps=config.taps,
        bias=config.net_bias,
        conv_bias=config.conv_bias,
        step_limits=config.step_limits,
        output_bias=output_bias,
        multipliers=multipliers,
        gate_norm=gate_norm,
        output_std=output_std,
        activation=activation,
        key=key,
    )


@dataclasses.dataclass(frozen=True)
class StepLimits(Entry):
    """`time_step_limit`, the least and the greatest step; steps have no bounds if it is missing or null."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `step_limits`; refuse anything but two numbers, the second of which may be infinite."""
        stated = published.listed("time_step_limit")
        limits = (0.0, math.inf) if stated is None else tuple(math.inf if end == _INFINITE else end for end in stated)
        if not fits(limits, STEP_LIMITS) or limits[0] > limits[1]:
            published.refuse(f"time_step_limit={stated}: it must be a least and a greatest step of at least 0.")
        return {"step_limits": limits}

    def write(self, config: NetSizes) -> Attributes:
        """Return the pair as transformers writes it, or nothing if steps have no bounds."""
        min_step, max_step = config.step_limits
        bound = {"time_step_limit": [min_step, _INFINITE if math.isinf(max_step) else max_step]}
        return {} if (min_step, max_step) == (0.0, math.inf) else bound


_INFINITE = {"__float__": "Infinity"}


@dataclasses.dataclass(frozen=True)
class ValueChannels(Entry):
    """Channels of a value head, which transformers counts twice: by heads, and by the width's multiple `expand`.

    `inner` is an attribute with the channels of all heads together, and its default; where that attribute is null,
    `expand` is read instead.
    """

    heads: str
    channels: str
    expand: str
    default: int | str
    inner: tuple[str, int] | None = None
    """The attribute, and its default."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `net_v_dim`; refuse one that does not fit the width."""
        heads, width = published.read(self.heads, Size, 128), published.read("hidden_size", Size)
        inner = int(published.read(self.expand, Positive, 2) * width)
        why = f"{inner} channels, {self.expand} * {width}"
        if self.inner is not None and (stated := published.nullable(*self.inner)) is not None:
            inner, why = published.checked(self.inner[0], stated, Size), f"{self.inner[0]}={stated} channels"
        value = published.take(self.channels, self.default)
        channels = inner // heads if value == "auto" else published.checked(self.channels, value, Size)
        if channels * heads != inner:
            published.refuse(f"{self.channels}={value}: {heads} heads ({self.heads}) must fill {why}.")
        return {"net_v_dim": channels}

    def write(self, config: NetSizes) -> Attributes:
        """Return both attributes."""
        inner = config.net_width
        if self.inner is not None:
            return {self.channels: config.net_v_dim, self.inner[0]: inner}
        expand = inner / config.embed if inner % config.embed else inner // config.embed
        return {self.channels: config.net_v_dim, self.expand: expand}


# Falcon-H1's attributes. Bamba and its successors have the same ones without `mamba_d_ssm`, the channels of all heads.
_VALUES = ("mamba_n_heads", "mamba_d_head", "mamba_expand", "auto")
STATED_MAMBA_ATTRIBUTES: tuple[Entry, ...] = (
    Count("net_heads", "mamba_n_heads", 128),
    Count("net_kv_heads", "mamba_n_groups", 1),
    Count("net_head_dim", "mamba_d_state", 256),
    Count("taps", "mamba_d_conv", 4),
    Attribute("net_bias", "mamba_proj_bias", False),
    Attribute("conv_bias", "mamba_conv_bias", True),
    StepLimits(),
    ValueChannels(*_VALUES, ("mamba_d_ssm", 1024)),
)
MAMBA_ATTRIBUTES = (*STATED_MAMBA_ATTRIBUTES[:-1], ValueChannels(*_VALUES))


def mamba_weights(prefix: str, path: str = "mixer.layer.") -> tuple[Rule, ...]:
    """Return the rules for a `Mamba2Mixer`: its input maps are published as one array, its convolutions as another."""
    parts = ("gate", "value", "key", "query", "step")
    convolutions = tuple(f"{part}_conv" for part in parts[1:4])
    rules = (
        Rule(
            f"{prefix}in_proj.weight",
            leaf_paths(parts, "weight", path),
            (_INTO_HEADS,) * 4 + ("",),
        ),
        Rule(f"{prefix}in_proj.bias", leaf_paths(parts, "bias", path), (_OF_HEADS,) * 4 + ("",)),
        Rule(f"{prefix}conv1d.weight", leaf_paths(convolutions, "weight", path), _TAPS_OF_HEADS),
        Rule(f"{prefix}conv1d.bias", leaf_paths(convolutions, "bias", path), _OF_HEADS),
        Rule(f"{prefix}A_log", f"{path}log_rate"),
        Rule(f"{prefix}dt_bias", f"{path}step_bias"),
        Rule(f"{prefix}D", f"{path}skip"),
        Rule(f"{prefix}norm.weight", f"{path}scale", _OF_HEADS),
        Rule(f"{prefix}out_proj.weight", f"{path}output.weight", "embed (heads dim) -> embed heads dim"),
        Rule(f"{prefix}out_proj.bias", f"{path}output.bias"),
    )
    return tuple(dataclasses.replace(rule, needs=f"{path}log_rate") for rule in rules)


def beside_mamba(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return an attention's rules, limited to layers that have no `Mamba2Mixer`."""
    return tuple(dataclasses.replace(rule, lacks="mixer.layer.log_rate") for rule in rules)


_INTO_HEADS = "(heads dim) embed -> heads dim embed"
_TAPS_OF_HEADS = "(heads dim) 1 taps -> heads dim taps"
_OF_HEADS = "(heads dim) -> heads dim"
