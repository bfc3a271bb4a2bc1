"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after sublayers, rotary positions in local layers only."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Llama3Scaling, Transformer
from .._attributes import Activation, Expect
from .._config_types import Index, Length, NotNegative, Positive, PublishedConfig
from .._family import DecoderConfig, Family
from .._layer_attributes import all_but_every, NullableWindows, Period
from ._common import ATTENTION, decoder_attributes, EDGES, GATED, head_norm_weights, POST_NORMS
from ._decoder import attention, decoder, gated_mlp, head_norms, layer_windows, post_norm_block, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exaone4Config(DecoderConfig):
    """The config of an EXAONE 4."""

    window: Length | None = 4096
    """The tokens that the layers of `window_layers` see; None: there are no windows, and all layers are rotated."""
    window_layers: tuple[Index, ...] = ()
    """The numbers of the layers that see a `window`; with a window, all other layers have no rotary positions."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 131_072


def build_exaone4(config: Exaone4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an EXAONE 4 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        is_rotated = window is not None or config.window is None
        rotary = rotary_of(config, config.head_size, scaling=config.scaling) if is_rotated else None
        attended = attention(config, window=window, rotary=rotary, output_std=None, **head_norms(config), key=mixer)
        return post_norm_block(config, attended, gated_mlp(config, output_std=None, key=feed_forward))

    return decoder(config, block, layer_windows(config), key=key)


def _local(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return all layers but the last of each period, a number or a text such as `LLLG`; none without a period."""
    name = "sliding_window_pattern"
    pattern = published.checked(name, published.nullable(name, 4), str | Index | None)
    if not pattern:  # It may be 0, which transformers writes if there is no window.
        return ()
    if not isinstance(pattern, str):
        return Period(4, (name,), but=True)(published, layers)
    if {*pattern} - {*"LG"}:
        published.refuse(f"{name}={pattern!r}: a layer is local, L, or global, G.")
    return tuple(number for number in range(layers) if pattern[number % len(pattern)] == "L")


_LONG = Llama3Scaling(16.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_PRESETS = {
    "exaone4-byte-500k": Exaone4Config(
        256, 96, 4, 6, 2, 256, window=64, window_layers=all_but_every(4, 4), theta=1e4, tied=True
    ),
    "exaone4-1.2b": Exaone4Config(
        102_400, 2048, 30, 32, 8, 4096, window=None, scaling=_LONG, tied=True, max_seq=65_536
    ),
    "exaone4-32b": Exaone4Config(102_400, 5120, 64, 40, 8, 27_392, window_layers=all_but_every(4, 64), scaling=_LONG),
}

EXAONE4 = Family(
    "exaone4",
    Exaone4Config,
    build_exaone4,
    _PRESETS,
    "Exaone4ForCausalLM",
    "exaone4",
    (
        *decoder_attributes(kv_heads=32),
        NullableWindows(4096, _local),
        Activation(),
        Expect("reorder_qk_norm", True, written=False),
    ),
    (*EDGES, *ATTENTION, *head_norm_weights(), *GATED, *POST_NORMS),
)
