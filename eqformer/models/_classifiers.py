"""Classifiers of texts and of tokens: how families publish the heads that take the place of a language model's."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Key

from ..nn import ACTIVATIONS, ClassificationHead, DenseLayer, LayerNorm, Linear, Pooling, Transformer, without_head
from ._config_types import Attributes, PublishedConfig
from ._weight_rules import Rule


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
    """How the vector of a text is made, a name in `nn.POOLINGS`; None: as in the family's published classifiers."""

    def __post_init__(self):
        if self.labels < 1:
            raise ValueError(f"Classifier(labels={self.labels}): a classifier has at least 1 label.")


DenseOptions = Callable[[Any], Mapping[str, Any]]
"""A function from a config to the options of a dense layer: `activation`, and `bias`, `norm_eps` and `norm_bias`."""


@dataclasses.dataclass(frozen=True)
class ClassifierTable:
    """Table of the published classifiers of a family."""

    weights: tuple[Rule, ...]
    """Rules for the arrays of a classifier, whose paths begin with `classifier.`."""
    pooling: str = "lasttoken"
    """How the vector of a text is made."""
    pooling_attribute: str | None = None
    """The attribute of `config.json` that states the pooling; None: all published models have the same."""
    dense: DenseOptions | None = None
    """The dense layer of a classifier of texts; None: there is none."""
    token_dense: DenseOptions | None = None
    """The dense layer of a classifier of tokens; None: there is none."""
    bias: bool = True
    """Whether the scores of texts have a bias; those of tokens always have one."""

    def add_to(self, model: Transformer, config: Any, classifier: Classifier, *, key: Key[Array, ""]) -> Transformer:
        """Return the model with a classifier of random weights in the place of its head."""
        dense_key, output_key = jax.random.split(key)
        options, embed = self.token_dense if classifier.classifies_tokens else self.dense, config.embed
        pooling = None if classifier.classifies_tokens else Pooling((classifier.pooling or self.pooling,))
        bias = classifier.classifies_tokens or self.bias
        output = Linear("embed -> labels", bias=bias, embed=embed, labels=classifier.labels, key=output_key)
        dense = None if options is None else _dense_layer(embed, **options(config), key=dense_key)
        return dataclasses.replace(without_head(model), classifier=ClassificationHead(pooling, dense, output))

    def read(self, architecture: str, attributes: PublishedConfig) -> Classifier:
        """Return the classifier of a published configuration, whose model is of this architecture."""
        names = attributes.nested("id2label")
        labels = len(names) or attributes.count("num_labels", 2)
        pooling = attributes.text(self.pooling_attribute, self.pooling) if self.pooling_attribute else None
        return Classifier(labels, architecture.endswith(_TOKENS), pooling)

    def reads(self, name: str, classifier: Classifier) -> bool:
        """Return whether a classifier has a leaf for the array of this name in the table."""
        has_dense = (self.token_dense if classifier.classifies_tokens else self.dense) is not None
        return any(
            rule.name == name and (has_dense or not str(rule.path).startswith("classifier.dense."))
            for rule in self.weights
        )

    def write(self, call: str, architecture: str, model: Transformer) -> Attributes:
        """Return the attributes to publish for a model with a classifier, given its family's architecture.

        Raises a `ValueError` that begins with `call` for a pooling that no attribute states.
        """
        classifier = classifier_of(model)
        assert classifier is not None
        if self.pooling_attribute is None and classifier.pooling not in (None, self.pooling):
            raise ValueError(
                f"{call}: the classifier's pooling is {classifier.pooling!r}, but the family's published classifiers "
                f"have {self.pooling!r} and state none; build it with Classifier(..., pooling=None)."
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
    """Return the rules of the weight and the bias of a map of a classifier."""
    return tuple(Rule(f"{published}.{leaf}", f"classifier.{path}.{leaf}") for leaf in ("weight", "bias"))


def _only(rules: tuple[Rule, ...], *, classifies_tokens: bool) -> tuple[Rule, ...]:
    """Return rules that apply only to classifiers of tokens, or only to those of texts."""
    path = "classifier.pooling"
    return tuple(dataclasses.replace(rule, **{"lacks" if classifies_tokens else "needs": path}) for rule in rules)


DECODER_CLASSIFIER = ClassifierTable(linear_rules("score", "output"), bias=False)
"""Classifiers of decoders read the last token's vector."""
OLDER_DECODER_CLASSIFIER = ClassifierTable(
    (
        *_only(linear_rules("score", "output"), classifies_tokens=False),
        *_only(linear_rules("classifier", "output"), classifies_tokens=True),
    ),
    bias=False,
)
"""Classifiers of older decoders, such as GPT-2, whose map to the scores of tokens has another name."""
