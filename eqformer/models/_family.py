"""What a family is: one object that says how its models are built, and how they are published."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import jax

from ..nn import RotaryScaling, Transformer
from ._attributes import Entry, kinds_of, read_entries
from ._config_types import described_kind, fits, LayerCount, Length, NotNegative, Positive, shown, Size
from ._multimodal import Tower
from ._predictors import PredictorTable
from ._published_config import PublishedConfig
from ._rotary_attributes import check_scaling
from ._weight_rules import NOTHING_STORED, Rule, Stored, Weight, weights_of


HEAD = "lm_head.weight"  # what most families call the head


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and choices of a model; each family has a class of its own for them."""

    vocab: Size
    """Ids."""
    embed: Size
    """Channels of the residual stream."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The fields that most families' configs have."""

    layers: LayerCount
    """Layers."""
    heads: Size
    """Heads of queries."""
    kv_heads: Size
    """Heads of keys and values."""
    mlp: Size
    """Hidden features of a feed-forward layer, or of an expert."""
    _: dataclasses.KW_ONLY
    head_dim: Size | None = None
    """Channels of a head; None: embed / heads."""
    theta: Positive = 10_000.0
    """The base of rotary positions."""
    scaling: RotaryScaling | None = None
    """Of rotary positions."""
    activation: str = "silu"
    """The activation of a feed-forward layer's gate: a name of `nn.ACTIVATIONS`."""
    eps: NotNegative = 1e-6
    """What norms add before the root."""
    tied: bool = False
    """Whether the head is the embedding's table."""
    max_seq: Length = 32_768
    """The longest rows it was trained on; it changes nothing."""

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.embed // self.heads


def check_config(call: str, config: ModelConfig) -> None:
    """Raise a `ValueError` that names a field which is not of its kind, or numbers of a scaling that do not fit."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{call}: {text}")

    kinds = kinds_of(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, name)
        if not fits(value, kinds[name]):
            refuse(f"{name}={shown(value)}: it must be {described_kind(kinds[name], value)}.")
        if isinstance(value, ModelConfig):
            check_config(f"{call}: {name}", value)
    check_scaling(config, refuse)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family: its configs' class, what builds a model from one, presets by name, and how it is published."""

    name: str
    """Its name here."""
    config: type[ModelConfig]
    """The class of its configs."""
    build: Callable[..., Transformer]
    """Builds a model of a config and a `key`."""
    presets: Mapping[str, ModelConfig]
    """Configs by name."""
    architecture: str = ""
    """The name of its class in transformers."""
    model_type: str | None = None
    """Its name in a `config.json`; None: it is published in no common format."""
    attributes: tuple[Entry, ...] = ()
    """The table between a `config.json` and a config, read in both directions."""
    weights: tuple[Rule, ...] = ()
    """The table between published arrays and a model's leaves, read in both directions."""
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Of names of buffers, which say nothing."""
    ignored_prefixes: tuple[str, ...] = ()
    """Of names in parts that are not ours."""
    unread: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """Gives how names begin of arrays that no model of a config reads."""
    is_bare: bool = False
    """Whether its models are published without the base model's prefix too, so that nothing is told of its absence."""
    aliases: tuple[str, ...] = ()
    """Other names that a `config.json` may give its models."""
    predictor: PredictorTable | None = None
    """How its models publish what predicts a further token; None: they are read without it."""
    towers: tuple[Tower, ...] = ()
    """Published models of several kinds of data whose text model is one of this family."""
    as_stored: Callable[[ModelConfig, Collection[str]], ModelConfig] | None = None
    """The config, given the names of a folder's arrays, where its `config.json` does not say all; None: it does."""

    def read(self, published: PublishedConfig) -> ModelConfig:
        """The config of a model published with this configuration; raises a `ValueError` for what is not supported."""
        found = read_entries(self.attributes, published, kinds_of(self.config))
        try:
            config = self.config(**found)
        except ValueError as error:
            published.refuse(str(error))
        check_scaling(config, published.refuse)
        return config

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The configuration to publish; raises a `ValueError` for what none can say."""
        found: dict[str, Any] = {}
        for entry in self.attributes:
            found |= entry.write(config)
        return found

    def rules(
        self, config: ModelConfig, model: Transformer, stored: Stored = NOTHING_STORED, tower: Tower | None = None
    ) -> list[Weight]:
        """Where each published array of a model of this config stands in it.

        `stored` are the shapes of a folder's arrays, and `tower` is the whole of which the model is the text model.
        """
        table = self.weights if tower is None else (*self.weights, *tower.weights)
        found = weights_of(table, config, model, stored)
        if self.predictor is None or model.predictor is None:
            return found
        return found + self.predictor.rules(table, config, model.predictor, stored)

    @property
    def base_prefix(self) -> str:
        """The prefix of the base model's arrays, which folders of the base model alone lack; empty if it has none."""
        word = self.table_name.partition(".")[0]
        return (
            f"{word}."
            if any(rule.name.startswith(f"{word}.") and "{layer}" in rule.name for rule in self.weights)
            else ""
        )

    @property
    def table_name(self) -> str:
        """The published name of the embedding's table."""
        return next((rule.name for rule in self.weights if rule.path == "embedding.weight"), "")

    @property
    def head_name(self) -> str:
        """The published name of the weight of a head that is not tied to the table."""
        return next((rule.name for rule in self.weights if rule.path == "head.weight"), HEAD)

    def is_of_head(self, rule: Weight, model: Transformer) -> bool:
        """Whether a rule's leaves stand between the base model and the logits."""
        leaves = {id(leaf) for leaf in rule.leaves(model)}
        of_predictor = {id(leaf) for leaf in jax.tree.leaves(model.predictor)}
        is_outside = bool(self.base_prefix) and not rule.name.startswith(self.base_prefix) and not leaves & of_predictor
        return is_outside or leaves <= {id(leaf) for leaf in jax.tree.leaves(model.head)}

    def is_unread(self, name: str, config: ModelConfig) -> bool:
        """Whether an array of this name, as the table would call it, is left alone."""
        return name.startswith((*self.ignored_prefixes, *self.unread(config)))

    def copies(self, config: ModelConfig, model: Transformer) -> dict[str, Any]:
        """The names of arrays that are published again with a model's predictor, and the leaves that they are."""
        return {} if self.predictor is None or model.predictor is None else self.predictor.copies_of(config, model)
