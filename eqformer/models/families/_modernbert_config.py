"""The config of ModernBERT."""

import dataclasses

from ...nn import RotaryScaling
from .._family import ModelConfig
from .._kinds import Index, LayerCount, Length, NotNegative, Positive, Size


@dataclasses.dataclass(frozen=True)
class ModernBERTConfig(ModelConfig):
    """The config of a ModernBERT."""

    layers: LayerCount
    """Layers."""
    heads: Size
    """Heads, of embed / heads channels."""
    mlp: Size
    """Hidden features of a feed-forward layer."""
    _: dataclasses.KW_ONLY
    global_layers: tuple[Index, ...]
    """The numbers of the layers of which each token sees all others."""
    window: Length = 128
    """The tokens that it sees in other layers, half of them on either side."""
    theta: Positive = 160_000.0
    """The base of rotary positions."""
    scaling: RotaryScaling | None = None
    """Their scaling."""
    local_theta: Positive = 10_000.0
    """The base of layers with a window."""
    local_scaling: RotaryScaling | None = None
    """Their scaling."""
    eps: NotNegative = 1e-5
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
    max_seq: Length = 8192
    """The longest rows it was trained on; it changes nothing."""
