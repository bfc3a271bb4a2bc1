"""The `Family` object: how a family's models and classifiers are built, and how they are published.

In a classifier, a classification head takes the place of the language-model head.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Key

from .._annotation_checks import fits
from ..nn import (
    ACTIVATIONS,
    ClassificationHead,
    DenseLayer,
    LayerNorm,
    Linear,
    Pooling,
    RotaryScaling,
    Transformer,
    without_head,
)
from . import _config_types as config_types
from ._attributes import Entry, field_types, read_entries
from ._config_types import Attributes, PublishedConfig
from ._rotary_scaling import check_scaling
from ._weight_rules import NOTHING_STORED, PREDICTOR, PredictorTable, resolve_rules, ResolvedRule, Rule, StoredShapes


_TEXTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_STEM = re.compile(r"For[A-Z]\w*|LMHeadModel")


@dataclasses.dataclass(frozen=True)
class Classifier:
    """The sizes of a classifier, for `build(model, classifier=...)`."""

    labels: int
    """The number of labels; 1 for a score, as in rerankers and reward models."""
    classifies_tokens: bool = False
    """Whether each token is classified, instead of each text."""
    pooling: str | None = None
    """How the vectors of a text's tokens become one vector, a name in `nn.POOLINGS`; None: as in the family's published
    classifiers."""

    def __post_init__(self):
        if self.labels < 1:
            raise ValueError(f"Classifier(labels={self.labels}): a classifier has at least 1 label.")


DenseOptions = Callable[[Any], Mapping[str, Any]]
"""A function from a config to a dense layer's options: `activation`, optionally `bias`, `norm_eps`, `norm_bias`."""


@dataclasses.dataclass(frozen=True)
class ClassifierTable:
    """Table of the published classifiers of a family."""

    weights: tuple[Rule, ...]
    """Rules for the arrays of a classifier, whose paths begin with `classifier.`."""
    pooling: str = "lasttoken"
    """How the vectors of a text's tokens become one vector, a name in `nn.POOLINGS`."""
    pooling_attribute: str | None = None
    """The attribute of `config.json` that states the pooling; None: all published models have the same pooling."""
    dense: DenseOptions | None = None
    """The dense layer of a classifier of texts; None: there is none."""
    token_dense: DenseOptions | None = None
    """The dense layer of a classifier of tokens; None: there is none."""
    bias: bool = True
    """Whether the scores of classifiers of texts have a bias; the scores of classifiers of tokens always have one."""

    def add_to(self, model: Transformer, config: Any, classifier: Classifier, *, key: Key[Array, ""]) -> Transformer:
        """Return the model with a classifier of random weights in the place of its head."""
        dense_key, output_key = jax.random.split(key)
        options = self.token_dense if classifier.classifies_tokens else self.dense
        embed = model.embedding.weight.shape[-1]  # `encode` returns as many channels as the embedding table has.
        pooling = None if classifier.classifies_tokens else Pooling((classifier.pooling or self.pooling,))
        bias = classifier.classifies_tokens or self.bias
        output = Linear("embed -> labels", bias=bias, embed=embed, labels=classifier.labels, key=output_key)
        dense = None if options is None else _dense_layer(embed, **options(config), key=dense_key)
        return dataclasses.replace(without_head(model), classifier=ClassificationHead(pooling, dense, output))

    def read(self, architecture: str, attributes: PublishedConfig) -> Classifier:
        """Return the classifier of a published configuration; `architecture` is its model's class in transformers."""
        names = attributes.nested("id2label")
        labels = len(names) or attributes.count("num_labels", 2)
        pooling = attributes.text(self.pooling_attribute, self.pooling) if self.pooling_attribute else None
        return Classifier(labels, architecture.endswith(_TOKENS), pooling)

    def reads(self, name: str, classifier: Classifier) -> bool:
        """Return whether the classifier has a leaf for the array that the table calls `name`."""
        has_dense = (self.token_dense if classifier.classifies_tokens else self.dense) is not None
        return any(
            rule.name == name and (has_dense or not str(rule.path).startswith("classifier.dense."))
            for rule in self.weights
        )

    def write(self, call: str, architecture: str, model: Transformer) -> Attributes:
        """Return the attributes to publish for a model with a classifier; `architecture` is the family's architecture.

        Raises a `ValueError` that begins with `call` for a pooling that no attribute can state.
        """
        classifier = classifier_of(model)
        assert classifier is not None
        if self.pooling_attribute is None and classifier.pooling not in (None, self.pooling):
            raise ValueError(
                f"{call}: the classifier's pooling is {classifier.pooling!r}, but the family's published classifiers "
                f"have {self.pooling!r} and no attribute for it; build it with Classifier(..., pooling=None)."
            )
        kind = _TOKENS if classifier.classifies_tokens else _TEXTS
        names = {str(number): f"LABEL_{number}" for number in range(classifier.labels)}
        attributes = Attributes(architectures=[_STEM.sub("", architecture) + kind], id2label=names)
        attributes |= {"label2id": {name: int(number) for number, name in names.items()}}
        if self.pooling_attribute and classifier.pooling:
            attributes[self.pooling_attribute] = classifier.pooling
        return attributes


def _dense_layer(
    embed: int,
    *,
    activation: str,
    bias: bool = True,
    norm_eps: float | None = None,
    norm_bias: bool = False,
    key: Key[Array, ""],
) -> DenseLayer:
    linear = Linear("embed -> hidden", bias=bias, embed=embed, hidden=embed, key=key)
    norm = None if norm_eps is None else LayerNorm("embed", embed=embed, eps=norm_eps, bias=norm_bias)
    return DenseLayer(linear, ACTIVATIONS[activation], norm)


def names_classifier(architecture: object) -> bool:
    """Return whether an architecture of transformers is a classifier of texts or of tokens."""
    return isinstance(architecture, str) and architecture.endswith((_TEXTS, _TOKENS))


def classifier_of(model: Transformer) -> Classifier | None:
    """Return the sizes of a model's classifier; None for a model without one."""
    head = model.classifier
    if head is None:
        return None
    (labels,) = head.output.output_shape
    return Classifier(labels, head.pooling is None, None if head.pooling is None else head.pooling.modes[0])


def linear_rules(published: str, path: str) -> tuple[Rule, ...]:
    """Return the rules of the weight and the bias of one linear map of a classifier."""
    return tuple(Rule(f"{published}.{leaf}", f"classifier.{path}.{leaf}") for leaf in ("weight", "bias"))


def _only(rules: tuple[Rule, ...], *, classifies_tokens: bool) -> tuple[Rule, ...]:
    """Return the rules, limited to classifiers of tokens if `classifies_tokens`, else to classifiers of texts."""
    path = "classifier.pooling"
    return tuple(dataclasses.replace(rule, **{"lacks" if classifies_tokens else "needs": path}) for rule in rules)


DECODER_CLASSIFIER = ClassifierTable(linear_rules("score", "output"), bias=False)
"""The table of most decoders' classifiers, which read the last token's vector."""
OLDER_DECODER_CLASSIFIER = ClassifierTable(
    (
        *_only(linear_rules("score", "output"), classifies_tokens=False),
        *_only(linear_rules("classifier", "output"), classifies_tokens=True),
    ),
    bias=False,
)
"""The table of classifiers of older decoders, such as GPT-2. Their output map is named `score` in classifiers of texts
and `classifier` in classifiers of tokens."""


HEAD = "lm_head.weight"  # the published name of most families' heads


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Base class of families' configs: the sizes and options of a model."""

    vocab: config_types.Size
    """The number of token ids."""
    embed: config_types.Size
    """Channels of the residual stream."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Base class of configs with the fields that most families share."""

    layers: config_types.LayerCount
    """The number of layers."""
    heads: config_types.Size
    """The number of query heads."""
    kv_heads: config_types.Size
    """The number of key heads, which is also the number of value heads."""
    mlp: config_types.Size
    """Hidden features of a feed-forward layer or of an expert."""
    _: dataclasses.KW_ONLY
    head_dim: config_types.Size | None = None
    """Channels of a head; None: embed / heads."""
    theta: config_types.Positive = 10_000.0
    """The base of rotary positions."""
    scaling: RotaryScaling | None = None
    """The scaling of rotary positions; None: no scaling."""
    activation: str = "silu"
    """The activation of a feed-forward layer's gate: a name of `nn.ACTIVATIONS`."""
    eps: config_types.NotNegative = 1e-6
    """The epsilon of norms, which is added to the mean square before the root."""
    tied: bool = False
    """Whether the embedding's table is the head too."""
    max_seq: config_types.Length = 32_768
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.embed // self.heads


@runtime_checkable
class HeadCounts(Protocol):
    """Fields of a config whose heads share the channels of the residual stream."""

    @property
    def embed(self) -> int: ...
    @property
    def heads(self) -> int: ...


def divide_heads(config: HeadCounts) -> int:
    """Return the channels of a head, `embed / heads`; raise a `ValueError` if the heads do not divide `embed`."""
    if config.heads < 1 or config.embed % config.heads:
        name = type(config).__name__
        raise ValueError(f"{name}(embed={config.embed}, heads={config.heads}): heads must divide embed.")
    return config.embed // config.heads


def check_config(call: str, config: ModelConfig) -> None:
    """Raise a `ValueError` if a field's value does not fit its type, or if a rotary scaling does not fit the config."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{call}: {text}")

    types = field_types(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, name)
        if not fits(value, types[name]):
            rule = config_types.describe_type(types[name], value)
            refuse(f"{name}={config_types.format_value(value)}: it must be {rule}.")
        if isinstance(value, ModelConfig):
            check_config(f"{call}: {name}", value)
    check_scaling(config, refuse)


TEXT, TIED = "text_config", "tie_word_embeddings"
# Prefixes of the names of arrays that are not read: arrays of the parts for images and sound, and of predictors.
_PARTS = (
    "visual vision_tower vision_model vision_encoder vision_embed_tokens embed_vision vision_adapter vision_projection "
    "multi_modal_projector vit_large_projector mm_projector patch_merger patch_merge_mlp audio_tower audio_model "
    "embed_audio audio_projector mtp"
)
_UNREAD = re.compile(rf"(?:model\.)?(?:{'|'.join(_PARTS.split())})\.")
# Attributes of a multimodal model that concern only the parts for images and sound.
_OTHER_PARTS = re.compile(
    r"image|video|vision|audio|multi_?modal|projector|^projection_|^media_|^ignore_index$|^mm_|^spatial_|^out_hidden"
    r"|^merged_hidden|^img_|^(boi|eoi|boa|eoa)_|^downsample_factor$|^alignment_"
)


@dataclasses.dataclass(frozen=True)
class MultimodalModel:
    """A published model of text and images or sound, whose text model belongs to a family.

    Its `config.json` has the text model's attributes in `text_config`. If `tie_word_embeddings` is also stated outside
    of `text_config`, the outer value takes precedence, as in transformers.
    """

    model_type: str
    """The multimodal model's `model_type`."""
    text_type: str = ""
    """The text model's `model_type` within `text_config`; empty: the family's `model_type`."""
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """The values that transformers takes for attributes that `text_config` leaves out."""
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Attributes that have one fixed value in this model; `text_config` may leave them out."""
    weights: tuple[Rule, ...] = ()
    """Further rules for the text model's arrays, which apply only in folders of the multimodal model."""
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."), ("language_model.", ""))
    """Pairs of prefixes of names: the prefix of the text model's arrays in a folder, and the prefix of the same arrays
    in the family's table."""

    def text_attributes(self, published: config_types.PublishedConfig) -> config_types.Attributes:
        """Return the text model's attributes; raises a `ValueError` for an attribute that is not known."""
        attributes = {**self.defaults, **self.fixed, **published.nested(TEXT)}
        for name, value in self.fixed.items():
            if attributes[name] not in (value, None):
                stated = attributes[name]
                published.refuse(f"{TEXT}: {name}={stated!r}: in {self.model_type!r} it must be {value!r}.")
        attributes |= self.fixed
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(rotary := attributes.get(name), dict):
                attributes[name] = _drop_mrope(rotary)
        if (tied := published.take(TIED, None)) is not None:
            attributes[TIED] = tied
        published.finish(_OTHER_PARTS.search)
        return attributes

    def table_name(self, name: str) -> str | None:
        """Return the name that the family's table gives to a folder's array; None for an array that is not read."""
        if _UNREAD.match(name):
            return None
        for prefix, table_prefix in self.prefixes:
            if name.startswith(prefix):
                return table_prefix + name.removeprefix(prefix)
        return name


def _drop_mrope(rotary: Mapping[str, object]) -> config_types.Attributes:
    """Return rotary parameters without the sections for time, height and width, which have equal positions for text."""
    parameters = {name: value for name, value in rotary.items() if name not in ("mrope_section", "mrope_interleaved")}
    return parameters | {name: "default" for name in ("type", "rope_type") if parameters.get(name) == "mrope"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family: the class of its configs, the function that builds a model, presets, and how models are published."""

    name: str
    """The family's name in eqformer."""
    config: type[ModelConfig]
    """The class of the family's configs."""
    build: Callable[..., Transformer]
    """The function that builds a model from a config and a `key`."""
    presets: Mapping[str, ModelConfig]
    """Configs by name."""
    architecture: str = ""
    """The name of the class in transformers for models of the family."""
    model_type: str | None = None
    """The `model_type` in `config.json`; None: the family has no published format."""
    attributes: tuple[Entry, ...] = ()
    """The table between a `config.json` and a config, read in both directions."""
    weights: tuple[Rule, ...] = ()
    """The table between published arrays and a model's leaves, read in both directions."""
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Suffixes of the names of buffers, which hold nothing to load."""
    constants: Callable[..., Mapping[str, np.ndarray]] = lambda config: {}
    """A function from a config to the published arrays of whole numbers that follow from the config, by name. They are
    written with a model; a folder may lack them, and other values are refused."""
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of the names of arrays of parts that eqformer does not have."""
    unread: Callable[..., tuple[str, ...]] = lambda config: ()
    """A function from a config to the prefixes of the names of arrays that models of this config do not read."""
    is_bare: bool = False
    """Whether published folders commonly lack the base model's prefix, in which case loading gives no warning."""
    aliases: tuple[str, ...] = ()
    """Further `model_type`s of models of the family."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arrays that transformers ties to other arrays, but that some folders hold a second time: each array's published
    name, and the path of the leaf that the array equals. The weight of a tied head need not be listed."""
    classifier: ClassifierTable | None = DECODER_CLASSIFIER
    """How classifiers of texts and of tokens are published; None: the family has no classifiers."""
    predictor: PredictorTable | None = None
    """How a predictor, the module for multi-token prediction, is published; None: models are read without it."""
    multimodal: tuple[MultimodalModel, ...] = ()
    """Published multimodal models whose text model is of this family."""
    denoises_blocks: bool = False
    """Whether its models denoise blocks of tokens (block diffusion), in place of decoding one token after another."""
    as_stored: Callable[[ModelConfig, Collection[str]], ModelConfig] | None = None
    """A function that corrects a config by the names of a folder's arrays; None: `config.json` states everything."""

    def read(self, published: config_types.PublishedConfig) -> ModelConfig:
        """Return the config of a model with this configuration; raises a `ValueError` for attributes that are not
        supported."""
        fields = read_entries(self.attributes, published, field_types(self.config))
        try:
            config = self.config(**fields)
        except ValueError as error:
            published.refuse(str(error))
        check_scaling(config, published.refuse)
        return config

    def write(self, config: ModelConfig) -> config_types.Attributes:
        """Return the configuration to publish; raises a `ValueError` for a config that no configuration can express."""
        attributes = config_types.Attributes()
        for entry in self.attributes:
            attributes |= entry.write(config)
        return attributes

    def rules(
        self,
        config: ModelConfig,
        model: Transformer,
        stored: StoredShapes = NOTHING_STORED,
        multimodal: MultimodalModel | None = None,
    ) -> list[ResolvedRule]:
        """Return the rules between published arrays and the leaves of a model of this config.

        `stored` are the shapes of a folder's arrays. `multimodal` is the multimodal model that contains this text
        model, or None.
        """
        table = self.weights if multimodal is None else (*self.weights, *multimodal.weights)
        if self.classifier is not None and model.classifier is not None:
            table = (*table, *self.classifier.weights)
        rules = resolve_rules(table, config, model, stored)
        if self.predictor is None or model.predictor is None:
            return rules
        return rules + self.predictor.rules(table, config, model.predictor, stored)

    @property
    def is_encoder(self) -> bool:
        """Whether its models are encoders for masked tokens, which write no text."""
        return self.architecture.endswith("ForMaskedLM")

    @property
    def decodes_tokens(self) -> bool:
        """Whether its models write texts by decoding one token after another."""
        return not (self.is_encoder or self.denoises_blocks)

    @property
    def base_prefix(self) -> str:
        """The prefix of the names of the base model's arrays; empty if there is none.

        In folders of a base model without a head, the names lack this prefix.
        """
        prefix = f"{self.table_name.partition('.')[0]}."
        has_layers = any(rule.name.startswith(prefix) and "{layer}" in rule.name for rule in self.weights)
        return prefix if has_layers else ""

    @property
    def table_name(self) -> str:
        """The published name of the embedding's table."""
        return next((rule.name for rule in self.weights if rule.path == "embedding.weight"), "")

    @property
    def head_name(self) -> str:
        """The published name of the weight of an untied head."""
        return next((rule.name for rule in self.weights if rule.path == "head.weight"), HEAD)

    def is_of_head(self, rule: ResolvedRule) -> bool:
        """Return whether a rule's leaves are the head, or a layer between the base model and the head."""
        is_of_predictor = any(path.startswith(PREDICTOR) for path in rule.paths)
        is_outside = bool(self.base_prefix) and not rule.name.startswith(self.base_prefix) and not is_of_predictor
        return is_outside or all(path.startswith(("head.", "classifier.")) for path in rule.paths)

    def is_unread(self, name: str, config: ModelConfig) -> bool:
        """Return whether models of this config do not read the array that the table calls `name`."""
        return name.startswith((*self.ignored_prefixes, *self.unread(config)))

    def tied_leaves(self, model: Transformer) -> dict[str, str]:
        """Return the arrays that a folder may hold although the head is tied, with the paths of the equal leaves."""
        return {self.head_name: "embedding.weight", **self.tied} if model.head is None else {}

    def copied_leaves(self, config: ModelConfig, model: Transformer) -> dict[str, str]:
        """Return the arrays that are published a second time with the predictor, with the paths of the equal leaves."""
        if self.predictor is None or model.predictor is None:
            return {}
        return self.predictor.copied_leaves(config, model)
