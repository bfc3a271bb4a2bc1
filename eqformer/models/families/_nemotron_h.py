"""Nemotron-H, Nemotron Nano 2 and 3 (NVIDIA 2025): each layer is a Mamba-2, an attention, or a feed-forward layer."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Key

from ...nn import Block, Layer, Linear, MLP, Residual, Transformer
from .._family import DecoderConfig, Family
from .._kinds import NotNegative, Number, Size
from ._decoder import attention, bend, damping, decoder, norm
from ._mixtures import BIASED_SIGMOIDS, mixture
from ._nemotron_h_tables import ATTRIBUTES, KINDS, WEIGHTS
from ._state_spaces import mamba2, NetSizes, STEP_LIMITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(NetSizes, DecoderConfig):
    """The config of a Nemotron-H; attention has no positions."""

    pattern: str
    """A letter for each layer: M has a Mamba-2, * an attention, - a feed-forward layer, and E experts."""
    expert_mlp: Size = 7688
    """Hidden features of an expert."""
    expert_latent: Size | None = None
    """Channels of what experts read; None: those of the stream."""
    shared_mlp: Size = 7688
    """Hidden features of the layer beside experts."""
    experts: Size = 8
    """Experts of a layer."""
    top_k: Size = 2
    """Experts of a token."""
    groups: Size = 1
    """Groups of experts."""
    kept_groups: Size = 1
    """Of which a token takes experts of so many."""
    scale: Number = 1.0
    """What weights of experts are multiplied by."""
    normalise: bool = True
    """Whether a token's weights add up to 1 before that."""
    activation: str = "relu_squared"
    net_activation: str = "silu"
    """The activation behind the convolutions of a Mamba-2: a name of `nn.ACTIVATIONS`."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases; experts have none."""
    eps: NotNegative = 1e-5
    step_limits: STEP_LIMITS = (0.001, math.inf)
    balance: ClassVar[float] = 0.0
    """No loss balances experts: the bias of their choice does."""

    def __post_init__(self):
        if len(self.pattern) != self.layers or set(self.pattern) - {*KINDS.values()}:
            raise ValueError(
                f"NemotronHConfig(layers={self.layers}, pattern={self.pattern!r}): the pattern has one of the letters "
                f"M, *, - and E for each layer; this one has {len(self.pattern)} letters."
            )


def build_nemotron_h(config: NemotronHConfig, *, key: Key[Array, ""]) -> Transformer:
    """A Nemotron-H with random weights."""

    def mlp(width: int, key: Key[Array, ""], *, embed: int = config.embed, bias: bool = config.mlp_bias) -> MLP:
        output_std = damping(config) * width**-0.5
        return MLP(embed=embed, mlp=width, activation=bend(config), bias=bias, output_std=output_std, key=key)

    def latent(to: Key[Array, ""], back: Key[Array, ""]) -> tuple[Linear, Linear] | None:
        if config.expert_latent is None:
            return None
        sizes: dict[str, Any] = {"embed": config.embed, "latent": config.expert_latent, "bias": config.mlp_bias}
        return Linear("embed -> latent", **sizes, key=to), Linear("latent -> embed", **sizes, key=back)

    def layer(kind: str, key: Key[Array, ""]) -> Layer:
        if kind == "M":
            return Block(Residual(mamba2(config, key, activation=bend(config, "net_activation")), norm(config)))
        if kind == "*":
            return Block(Residual(attention(config, rotary=None, key=key), norm(config)))
        if kind == "-":
            return Residual(mlp(config.mlp, key), norm(config))
        router, experts, shared = jax.random.split(key, 3)
        own: dict[str, Any] = {"shared": mlp(config.shared_mlp, shared), "router": router, "experts": experts}
        own |= {"latent": latent(*jax.random.split(jax.random.fold_in(key, 3)))}
        expert = lambda key: mlp(config.expert_mlp, key, embed=config.expert_latent or config.embed, bias=False)
        groups: dict[str, Any] = {"groups": config.groups, "kept_groups": config.kept_groups, **BIASED_SIGMOIDS}
        choice: dict[str, Any] = {"normalise": config.normalise, "scale": config.scale, **groups}
        return Residual(mixture(config, expert, **own, **choice), norm(config))

    return decoder(config, layer, tuple(config.pattern), key=key)


_BYTE: dict[str, Any] = {"net_heads": 8, "net_kv_heads": 2, "net_head_dim": 16, "net_v_dim": 16, "top_k": 4}
_BYTE |= {"head_dim": 16, "expert_mlp": 32, "shared_mlp": 64, "experts": 12, "tied": True, "mlp_bias": True}


def _nemotron(embed: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> NemotronHConfig:
    given: dict[str, Any] = {"vocab": 131_072, "layers": 52, "head_dim": 128, "net_kv_heads": 8}
    return NemotronHConfig(embed=embed, heads=heads, kv_heads=kv_heads, mlp=mlp, **given | more)


_PRESETS = {
    "nemotron-h-byte-500k": NemotronHConfig(256, 64, 6, 4, 2, 256, pattern="MEM*M-", expert_latent=32, **_BYTE),
    "nemotron-h-8b": _nemotron(
        *(4096, 32, 8, 21_504), net_heads=128, pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"
    ),
    "nemotron-3-nano-30b-a3b": _nemotron(
        *(2688, 32, 2, 1856),
        **{"net_heads": 64, "expert_mlp": 1856, "shared_mlp": 3712, "experts": 128, "top_k": 6, "scale": 2.5},
        pattern="MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
    ),
}

NEMOTRON_H = Family(
    "nemotron_h",
    NemotronHConfig,
    build_nemotron_h,
    _PRESETS,
    "NemotronHForCausalLM",
    "nemotron_h",
    ATTRIBUTES,
    WEIGHTS,
    ignored_prefixes=("mtp.",),  # predict further tokens
)
