"""The config of ModernBERT."""

import dataclasses

from ...nn import RotaryScaling
from .._family import ModelConfig


@dataclasses.dataclass(frozen=True)
class ModernBERTConfig(ModelConfig):
    """The config of a ModernBERT."""

    layers: int
    """Layers."""
    heads: int
    """Heads, of embed / heads channels."""
    mlp: int
    """Hidden features of a feed-forward layer."""
    _: dataclasses.KW_ONLY
    global_layers: tuple[int, ...]
    """The numbers of the layers of which each token sees all others."""
    window: int = 128
    """The tokens that it sees in other layers, half of them on either side."""
    theta: float = 160_000.0
    """The base of rotary positions."""
    scaling: RotaryScaling | None = None
    """Their scaling."""
    local_theta: float = 10_000.0
    """The base of layers with a window."""
    local_scaling: RotaryScaling | None = None
    """Their scaling."""
    eps: float = 1e-5
    """What norms add before the root."""
    activation: str = "gelu"
    """The activation of a feed-forward layer's gate: a name of `nn.ACTIVATIONS`."""
    dense_activation: str = "gelu"
    """The same of the map before the logits."""
    norm_bias: bool = False
    """Whether norms have biases."""
    bias: bool = False
    """Whether the attention's maps have."""
    mlp_bias: bool = False
    """Whether feed-forward layers have."""
    dense_bias: bool = False
    """Whether the map before the logits has."""
    logit_bias: bool = True
    """Whether logits have."""
    tied: bool = True
    """Whether the head is the embedding's table."""
    max_seq: int = 8192
    """The longest rows it was trained on; it changes nothing."""
