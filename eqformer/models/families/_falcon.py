"""Falcon 7B, 40B and 180B (Almazrouei et al. 2023, arXiv:2311.16867), Falcon 2 11B (2024), and Falcon RW.

Falcon 7B has one key head, and the larger models have few. Attention and feed-forward layer are parallel: neither reads
the other's output. In Falcon 40B and 180B, each of the two has a norm of its own. In Falcon 7B and Falcon 2, they share
one norm.

Falcon RW (Penedo et al. 2023, arXiv:2306.01116) has `nn.ALiBi` instead of rotary positions, as many key heads as query
heads, biases, and attention before the feed-forward layer.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import ALiBi, Block, LayerNorm, ParallelResidual, Residual, Scores, Transformer
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Length, NotNegative, PublishedConfig, Size
from .._family import DecoderConfig, Family, OLDER_DECODER_CLASSIFIER
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import INTO_HEADS, LAYER_H, leaf_paths, OF_HEADS, OUT_OF_HEADS, QKV, SIZES, weight_and_bias
from ._decoder import attention, decoder, mlp, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """The config of a Falcon."""

    parallel: bool = True
    """Whether attention and feed-forward layer are parallel, so that neither reads the other's output."""
    two_norms: bool = False
    """Whether each of the parallel parts has a norm of its own (Falcon 40B). False: both share one."""
    alibi: bool = False
    """Whether positions are given by `nn.ALiBi` in place of rotary positions."""
    bias: bool = False
    """Whether the projections of attention and feed-forward layers have biases."""
    activation: str = "gelu"
    eps: NotNegative = 1e-5
    tied: bool = True
    max_seq: Length = 2048

    def __post_init__(self):
        has_heads = self.heads > 0 and self.kv_heads > 0
        heads_fit = has_heads and not self.embed % self.heads and not self.heads % self.kv_heads
        if self.head_dim is not None or not heads_fit:
            raise ValueError(
                f"FalconConfig(embed={self.embed}, heads={self.heads}, kv_heads={self.kv_heads}, "
                f"head_dim={self.head_dim}): each head has embed / heads channels, and each key head serves "
                "heads / kv_heads query heads; give head_dim=None, heads that divide embed, and kv_heads that divide "
                "heads."
            )
        if not self.parallel and (self.two_norms or self.kv_heads not in (1, self.heads)):
            raise ValueError(
                f"FalconConfig(parallel=False, two_norms={self.two_norms}, heads={self.heads}, "
                f"kv_heads={self.kv_heads}): a published Falcon whose attention is before its feed-forward layer has "
                "two_norms=False, and one key head or as many as query heads."
            )
        if self.alibi and self.scaling is not None:
            raise ValueError(
                f"FalconConfig(alibi=True, scaling={self.scaling}): ALiBi takes the place of rotary positions, which "
                "the scaling is for; give scaling=None."
            )

    @property
    def is_new_architecture(self) -> bool:
        """Whether the config needs the architecture of Falcon 40B, `new_decoder_architecture`."""
        return self.two_norms or self.kv_heads not in (1, self.heads)


def build_falcon(config: FalconConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Falcon with random weights."""
    size = config.head_size
    # The biases of ALiBi are added before the scores are scaled.
    scores = Scores(alibi=ALiBi(heads=config.heads, scale=size**-0.5)) if config.alibi else None
    rotary = None if config.alibi else rotary_of(config, size, scaling=config.scaling)
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps)

    def block(key: Key[Array, ""]) -> Block | ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, rotary=rotary, scores=scores, key=mixer_key)
        feed_forward = mlp(config, config.mlp, bias=config.bias, key=feed_forward_key)
        if not config.parallel:
            return Block(Residual(mixer, norm()), Residual(feed_forward, norm()))
        if config.two_norms:
            return ParallelResidual((Residual(mixer, norm()), Residual(feed_forward, norm())))
        return ParallelResidual((Residual(mixer), Residual(feed_forward)), norm())

    return decoder(config, block, final_norm=norm(), key=key)


class _Arrangement(Entry):
    """Key heads, and the arrangement of a layer's parts, which five attributes state together.

    With `new_decoder_architecture`, `multi_query` has no effect, and `num_ln_in_parallel_attn` may be 2, its default.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `kv_heads`, `parallel` and `two_norms`; refuse attributes from which transformers builds no model."""
        heads = published.read("num_attention_heads", Size)
        is_new = published.flag("new_decoder_architecture", False)
        has_one_key_head, parallel = (published.flag(name, True) for name in ("multi_query", "parallel_attn"))
        norms = published.read("num_ln_in_parallel_attn", Size, 2 if is_new else 1)
        kv_heads = published.read("num_kv_heads", Size, heads)
        if norms not in ((1, 2) if is_new else (1,)) or (is_new and not parallel):
            published.refuse(
                f"new_decoder_architecture={is_new} with parallel_attn={parallel} and num_ln_in_parallel_attn={norms}: "
                "the new architecture needs parallel_attn=True and 1 or 2 norms, the older one has 1."
            )
        if not is_new and has_one_key_head:
            kv_heads = 1
        elif not is_new and kv_heads != heads:
            published.refuse(
                f"num_kv_heads={kv_heads} with num_attention_heads={heads}: without new_decoder_architecture and "
                "multi_query there are as many key heads as query heads."
            )
        return {"kv_heads": kv_heads, "parallel": parallel, "two_norms": norms == 2}

    def write(self, config: FalconConfig) -> Attributes:
        """Return all five attributes."""
        is_new = config.is_new_architecture
        has_one_key_head = not is_new and config.kv_heads == 1
        return {
            "new_decoder_architecture": is_new,
            "multi_query": has_one_key_head,
            "parallel_attn": config.parallel,
            "num_ln_in_parallel_attn": (2 if config.two_norms else 1) if is_new else None,
            "num_kv_heads": config.heads if has_one_key_head else config.kv_heads,
        }


class _FeedForwardWidth(Entry):
    """`ffn_hidden_size`, the hidden features of feed-forward layers; null or missing: four times `hidden_size`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `mlp`."""
        return {"mlp": published.read("ffn_hidden_size", Size, 4 * published.read("hidden_size", Size))}

    def write(self, config: FalconConfig) -> Attributes:
        """Return the attribute."""
        return {"ffn_hidden_size": config.mlp}


_RW = FalconConfig(50_304, 2048, 24, 32, 32, 8192, alibi=True, bias=True, parallel=False)
_PRESETS = {
    "falcon-byte-500k": FalconConfig(256, 96, 4, 6, 1, 384),
    "falcon-7b": FalconConfig(65_024, 4544, 32, 71, 1, 18_176),
    "falcon-40b": FalconConfig(65_024, 8192, 60, 128, 8, 32_768, two_norms=True),
    "falcon-180b": FalconConfig(65_024, 14_848, 80, 232, 8, 59_392, two_norms=True),
    "falcon2-11b": FalconConfig(65_024, 4096, 60, 32, 8, 16_384, theta=500_042.0, tied=False, max_seq=8192),
    "falcon-rw-1b": _RW,
    "falcon-rw-7b": dataclasses.replace(_RW, vocab=65_024, embed=4096, layers=36, heads=64, kv_heads=64, mlp=16_384),
}


def _norms(needs: str, **names: str) -> tuple[Rule, ...]:
    """Return the rules for norms of layers whose block has the field `needs`, given each norm's published name."""
    rules = (rule for path, name in names.items() for rule in weight_and_bias(f"{LAYER_H}{name}", f"{path}.norm"))
    return tuple(dataclasses.replace(rule, needs=needs) for rule in rules)


FALCON = Family(
    "falcon",
    FalconConfig,
    build_falcon,
    _PRESETS,
    "FalconForCausalLM",
    "falcon",
    (
        *(*SIZES, _FeedForwardWidth(), _Arrangement()),
        RotaryPositions(),
        Attribute("alibi", "alibi", False),
        Attribute("bias", "bias", False),
        Activation("gelu", "activation"),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("tied", "tie_word_embeddings", True),
        Attribute("max_seq", "max_position_embeddings", 2048),
        Expect("apply_residual_connection_post_layernorm", False, written=False),
        Ignore("ff_factor"),  # Transformers reads `ffn_hidden_size` instead.
    ),
    (
        Rule("transformer.word_embeddings.weight", "embedding.weight"),
        *weight_and_bias("transformer.ln_f", "norm"),
        Rule("lm_head.weight", "head.weight"),
        *weight_and_bias(f"{LAYER_H}input_layernorm", "norm"),  # the norm of a layer whose parts share one norm
        *_norms("sublayers", mixer="input_layernorm", feed_forward="post_attention_layernorm"),
        *_norms("branches", mixer="ln_attn", feed_forward="ln_mlp"),
        # Rows are ordered by key head: its query heads, then the key head and its value head.
        *(
            Rule(f"{LAYER_H}self_attention.query_key_value.{leaf}", leaf_paths(QKV, leaf), pattern, groups="kv_heads")
            for leaf, pattern in (("weight", INTO_HEADS), ("bias", OF_HEADS))
        ),
        *weight_and_bias(f"{LAYER_H}self_attention.dense", "mixer.layer.output", OUT_OF_HEADS),
        *weight_and_bias(f"{LAYER_H}mlp.dense_h_to_4h", "feed_forward.layer.up"),
        *weight_and_bias(f"{LAYER_H}mlp.dense_4h_to_h", "feed_forward.layer.down"),
    ),
    classifier=OLDER_DECODER_CLASSIFIER,
)
