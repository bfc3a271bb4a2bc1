"""Multi-token prediction: how families build and publish the module that predicts one token further."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from ..nn import Linear, Predictor, Transformer
from ._weight_rules import flatten_model, NOTHING_STORED, resolve_rules, ResolvedRule, Rule, StoredShapes


PREDICTOR = "predictor."
"""Prefix of the paths of the predictor's leaves."""
_LAYER = "model.layers.{layer}."
Tree = TypeVar("Tree", bound=PyTree)


@dataclasses.dataclass(frozen=True)
class PredictorTable:
    """Table of the published predictors of a family's models."""

    one_layer_config: Callable[..., object]
    """A function from a model's config to the config of a one-layer model whose layer is like the predictor's."""
    prefix: str
    """Prefix of the published names of the predictor's arrays; `{depth}` stands for the number of the model's
    layers."""
    weights: tuple[Rule, ...]
    """Rules for the predictor's arrays outside of its layer, whose names lack the prefix. The layer has the family's
    rules."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arrays that are published once more with the predictor: for each name without the prefix, the part of the model
    that has the array, `"embedding"` or `"head"`."""
    attributes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Attributes that the `config.json` of a model with a predictor has beside the family's."""

    def prefix_of(self, config: Any) -> str:
        """Return the prefix of the names of the predictor's arrays, for a model of this config."""
        return self.prefix.format(depth=config.layers)

    def build(self, make: Callable[..., Transformer], config: Any, *, key: Key[Array, ""]) -> Predictor:
        """Return a predictor with random weights; a one-layer model, built by `make`, provides its layer and norms."""
        layer_key, merge_key = jax.random.split(key)
        model, embed = make(self.one_layer_config(config), key=layer_key), config.embed
        return Predictor(
            embedding_norm=_copy_arrays(model.norm),
            hidden_norm=_copy_arrays(model.norm),
            merge=Linear("sides embed -> merged", sides=2, embed=embed, merged=embed, key=merge_key),
            stacks=model.stacks,
            norm=model.norm,
        )

    def rules(
        self,
        weights: Sequence[Rule],
        config: Any,
        predictor: Predictor,
        stored: StoredShapes = NOTHING_STORED,
    ) -> list[ResolvedRule]:
        """Return the rules for the predictor of a model of this config; `weights` are the family's rules."""
        prefix, depth = self.prefix_of(config), config.layers if "{depth}" in self.prefix else 0
        layer = _LAYER if depth else f"{prefix}layers.{{layer}}."
        table = [dataclasses.replace(rule, name=prefix + rule.name) for rule in self.weights]
        table += [
            dataclasses.replace(rule, name=rule.name.replace(_LAYER, layer))
            for rule in weights
            if "{layer}" in rule.name
        ]
        rules = resolve_rules(table, config, predictor, stored, root=PREDICTOR)
        return [dataclasses.replace(rule, layers=[number + depth for number in rule.layers]) for rule in rules]

    def copied_leaves(self, config: Any, model: Transformer) -> dict[str, str]:
        """Return, for the name of each array of `copies`, the path of the model's leaf that it repeats."""
        head = "embedding.weight" if model.head is None else "head.weight"
        path_of = {"embedding": "embedding.weight", "head": head}
        # A quantized head has no weight among the leaves, so its copy is left out and stays as it is stored.
        leaves, prefix = flatten_model(model), self.prefix_of(config)
        return {prefix + name: path_of[part] for name, part in self.copies.items() if path_of[part] in leaves}


def _copy_arrays(norm: Tree) -> Tree:
    """Return the module with copies of its arrays, so that no two norms share an array."""
    return jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, norm)


# DeepSeek-V3 publishes its predictor as one more layer of the model, with copies of the table and the head.
NUMBERED_PREDICTOR = PredictorTable(
    functools.partial(dataclasses.replace, layers=1, first_dense=0),
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
# Qwen3-Next and 3.5 publish their predictor under the prefix `mtp.`; its layer has an attention over all tokens.
NAMED_PREDICTOR = PredictorTable(
    functools.partial(dataclasses.replace, layers=1, attention_layers=(0,)),
    "mtp.",
    (
        Rule("pre_fc_norm_embedding.weight", "embedding_norm.weight"),
        Rule("pre_fc_norm_hidden.weight", "hidden_norm.weight"),
        Rule("fc.weight", "merge.weight", "merged (sides embed) -> merged sides embed"),
        Rule("norm.weight", "norm.weight"),
    ),
)
