"""Predictors of a further token, which stand behind published models: how they are built and published."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ..nn import Linear, Predictor, Transformer
from ._weight_rules import NOTHING_STORED, Rule, Stored, Weight, weights_of


_LAYER = "model.layers.{layer}."


@dataclasses.dataclass(frozen=True)
class PredictorTable:
    """How a family's models publish a predictor."""

    alone: Callable[[Any], Any]
    """The config of a model of one layer, such as the predictor's, of the model's config."""
    prefix: str
    """What names of its arrays begin with; with `{depth}` it is numbered like a layer behind the model's."""
    weights: tuple[Rule, ...]
    """Rules of what is not its layer's, whose rules are the family's; names without the prefix."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arrays that are copies of the model's own, by the paths of these; names without the prefix."""
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a configuration says of a model with one."""

    def prefix_of(self, config: Any) -> str:
        """What names of its arrays begin with, behind a model of this config."""
        return self.prefix.format(depth=config.layers)

    def build(self, make: Callable[..., Transformer], config: Any, *, key: Key[Array, ""]) -> Predictor:
        """A predictor with random weights, whose layer and norms are those that `make` gives a model of one layer."""
        layer, merge = jax.random.split(key)
        model, embed = make(self.alone(config), key=layer), config.embed
        return Predictor(
            embedding_norm=_copied(model.norm),
            hidden_norm=_copied(model.norm),
            merge=Linear("sides embed -> merged", sides=2, embed=embed, merged=embed, key=merge),
            stacks=model.stacks,
            norm=model.norm,
        )

    def rules(
        self, weights: Sequence[Rule], config: Any, predictor: Predictor, stored: Stored = NOTHING_STORED
    ) -> list[Weight]:
        """Where its arrays stand in a model of this config; `weights` are the family's."""
        prefix, depth = self.prefix_of(config), config.layers if "{depth}" in self.prefix else 0
        layer = _LAYER if depth else f"{prefix}layers.{{layer}}."
        table = [dataclasses.replace(rule, name=prefix + rule.name) for rule in self.weights]
        table += [
            dataclasses.replace(rule, name=rule.name.replace(_LAYER, layer))
            for rule in weights
            if "{layer}" in rule.name
        ]
        found = weights_of(table, config, predictor, stored)
        return [
            dataclasses.replace(
                rule,
                where=lambda model, where=rule.where: where(model.predictor),
                layers=[number + depth for number in rule.layers],
            )
            for rule in found
        ]

    def copies_of(self, config: Any, model: Transformer) -> dict[str, Any]:
        """The names of arrays that are copies, and the model's leaves that they are copies of."""
        head = model.embedding if model.head is None else model.head
        # A head that is kept as codes has no weight, and its copy stays as it is stored.
        leaves = {"embedding": model.embedding.weight, "head": getattr(head, "weight", None)}
        its = {self.prefix_of(config) + name: leaves[whose] for name, whose in self.copies.items()}
        return {name: leaf for name, leaf in its.items() if leaf is not None}


def _copied(norm: Any) -> Any:
    """A norm with arrays of its own."""
    return jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, norm)


# As DeepSeek-V3 publishes it, in one more layer of the model, with copies of what it shares.
BEHIND = PredictorTable(
    lambda config: dataclasses.replace(config, layers=1, first_dense=0),
    "model.layers.{depth}.",
    (
        Rule("enorm.weight", "embedding_norm.weight"),
        Rule("hnorm.weight", "hidden_norm.weight"),
        Rule("eh_proj.weight", "merge.weight", "merged (sides embed) -> merged sides embed"),
        Rule("shared_head.norm.weight", "norm.weight"),
    ),
    copies={"embed_tokens.weight": "embedding", "shared_head.head.weight": "head"},
    attributes={"num_nextn_predict_layers": 1},
)
# As Qwen3-Next and 3.5 publish it, with an attention over all tokens.
BESIDE = PredictorTable(
    lambda config: dataclasses.replace(config, layers=1, attention_layers=(0,)),
    "mtp.",
    (
        Rule("pre_fc_norm_embedding.weight", "embedding_norm.weight"),
        Rule("pre_fc_norm_hidden.weight", "hidden_norm.weight"),
        Rule("fc.weight", "merge.weight", "merged (sides embed) -> merged sides embed"),
        Rule("norm.weight", "norm.weight"),
    ),
)
