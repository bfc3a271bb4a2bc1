"""The text models of Muse Glimmer (Meta 2026): gated attention with windows and rotary positions.

Every fourth layer has no window and no rotary positions.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, GatedMLP, Residual, Scores, Transformer
from .._attributes import Activation, Attribute, Entry, Expect, Fields
from .._config_types import Attributes, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import all_but_every, every, layers_of, NullableWindows
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, FOUR_NORMS, GATED, INTO_HEADS, LAYER
from ._decoder import attention, decoder, gated_mlp, head_norms, layer_windows, norm, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuseGlimmerConfig(DecoderConfig):
    """The config of a Muse Glimmer."""

    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    no_rotary_layers: tuple[Index, ...]
    """The indices of the layers without rotary positions."""
    window: Length | None = 2048
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 128
    query_scale: Number = 3.87
    """A factor of the attention scores, in addition to `head_dim^-0.5`."""
    eps: NotNegative = 1e-5
    output_eps: NotNegative = 1e-8
    """The number that the norms after sublayers add to the mean square before the root."""
    logit_scale: Number = 256**0.5 * 6656**-0.5
    """A factor of the logits."""
    logit_softcap: Positive = 20.0
    """The softcap of the scaled logits."""
    max_seq: Length = 131_072


def build_muse_glimmer(config: MuseGlimmerConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Muse Glimmer with random weights."""

    def sublayer(layer: Attention | GatedMLP) -> Residual:
        output_norm = norm(config, offset=1.0, eps=config.output_eps)
        return Residual(layer, norm(config, offset=1.0), output_norm=output_norm)

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        is_rotated, window = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            window=window,
            output_std=None,
            **head_norms(config, scale=False),
            rotary=rotary_of(config, config.head_size, scaling=config.scaling) if is_rotated else None,
            gate=True,
            scores=Scores(config.query_scale * config.head_size**-0.5),
            key=mixer_key,
        )
        return Block(sublayer(mixer), sublayer(gated_mlp(config, output_std=None, key=feed_forward_key)))

    model = decoder(
        config,
        block,
        [(layer not in config.no_rotary_layers, window) for layer, window in enumerate(layer_windows(config))],
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        key=key,
    )
    return dataclasses.replace(model, embedding_norm=norm(config, scale=False))


def _from_the_last(layers: int) -> tuple[int, ...]:
    """Return the indices of the last layer and of every fourth layer before the last."""
    return tuple(range((layers - 1) % 4, layers, 4))


class PositionsByLayer(Entry):
    """Rotary positions, and `layer_rope_theta`: for each layer the base, or 0 for a layer without rotary positions."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the fields of the positions, and `no_rotary_layers`.

        Refuse bases that differ from `rope_theta`, because transformers would ignore them.
        """
        fields, layers = RotaryPositions().read(published), layers_of(published)
        if (thetas := published.listed("layer_rope_theta", NotNegative)) is None:
            return fields | {"no_rotary_layers": _from_the_last(layers)}
        if len(thetas) != layers or any(theta not in (0, fields["theta"]) for theta in thetas):
            published.refuse(
                f"layer_rope_theta={thetas} must have {layers} items, each of them the base, {fields['theta']}, or 0."
            )
        return fields | {"no_rotary_layers": tuple(layer for layer, theta in enumerate(thetas) if not theta)}

    def write(self, config: MuseGlimmerConfig) -> Attributes:
        """Return the attributes of rotary positions, and the list."""
        bases = [0.0 if layer in config.no_rotary_layers else config.theta for layer in range(config.layers)]
        return RotaryPositions().write(config) | {"layer_rope_theta": bases}


_PRESETS = {
    "muse-glimmer-byte-400k": MuseGlimmerConfig(
        *(256, 64, 8, 4, 2, 160),
        window_layers=all_but_every(4, 8),
        no_rotary_layers=every(4, 8),
        window=64,
        head_dim=16,
        logit_scale=2.0,
        max_seq=512,
    ),
    "muse-glimmer-30b": MuseGlimmerConfig(
        *(202_048, 6656, 52, 32, 2, 19_968),
        window_layers=all_but_every(4, 52),
        no_rotary_layers=every(4, 52),
        theta=500_000.0,
    ),
}
_GATE = Rule(f"{LAYER}self_attn.gate_proj.weight", "mixer.layer.gate.weight", INTO_HEADS)

MUSE_GLIMMER = Family(
    "muse_glimmer",
    MuseGlimmerConfig,
    build_muse_glimmer,
    _PRESETS,
    "MuseGlimmerForCausalLM",
    "muse_glimmer_text",
    (
        *decoder_attributes(PositionsByLayer(), head_dim=128, kv_heads=2, max_seq=131_072),
        NullableWindows(2048, lambda _, layers: {*range(layers)} - {*_from_the_last(layers)}),
        Attribute("query_scale", "qk_scale_factor", 3.87),
        Attribute("output_eps", "post_norm_eps", 1e-8),
        Attribute("logit_scale", "output_multiplier", 256**0.5 * 6656**-0.5),
        Attribute("logit_softcap", "final_logit_softcapping", 20.0),
        Activation(published="hidden_activation"),
        Expect("attention_bias", False, written=False),
    ),
    (*EDGES, *ATTENTION, _GATE, *GATED, *FOUR_NORMS),
    multimodal=(MultimodalModel("muse_glimmer"),),
)
