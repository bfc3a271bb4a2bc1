"""Multimodal models: where their text model stands in a folder, and what of the folder is left unread."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ._published_config import PublishedConfig
from ._weight_rules import Rule


TEXT, TIED = "text_config", "tie_word_embeddings"
# Parts that no text goes through, and predictors of further tokens: the first words of their arrays' names.
_PARTS = (
    "visual vision_tower vision_model vision_encoder vision_embed_tokens embed_vision vision_adapter vision_projection "
    "multi_modal_projector patch_merger audio_tower audio_model embed_audio audio_projector mtp"
)
_UNREAD = re.compile(rf"(?:model\.)?(?:{'|'.join(_PARTS.split())})\.")
# Attributes of the multimodal model that concern these parts alone.
_OTHER_PARTS = re.compile(
    r"image|video|vision|audio|multi_?modal|projector|^mm_|^spatial_|^out_hidden|^(boi|eoi|boa|eoa)_"
)


@dataclasses.dataclass(frozen=True)
class MultimodalModel:
    """A published model of several kinds of data whose text model is of a family.

    Its `config.json` has the text model's attributes in `text_config`. Where the multimodal model states
    `tie_word_embeddings` too, that value counts, as in transformers.
    """

    model_type: str
    """The multimodal model's `model_type`."""
    text_type: str = ""
    """The text model's `model_type` within `text_config`; empty: the family's."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values that transformers takes for attributes that `text_config` leaves out."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes of the family that have one value here, whether or not `text_config` states it."""
    weights: tuple[Rule, ...] = ()
    """Further rules, by which the text model is published here, and not where it stands alone."""
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."), ("language_model.", ""))
    """Pairs of what names of the text model's arrays begin with, and what they begin with in the family's table."""

    def text_attributes(self, published: PublishedConfig) -> dict[str, Any]:
        """Return the text model's attributes; raises a `ValueError` for attributes of no known part."""
        attributes = {**self.defaults, **self.fixed, **published.nested(TEXT)}
        for name, value in self.fixed.items():
            if attributes[name] not in (value, None):
                stated = attributes[name]
                published.refuse(f"{TEXT}: {name}={stated!r}: of {self.model_type!r} it is always {value!r}.")
        attributes |= self.fixed
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(rotary := attributes.get(name), dict):
                attributes[name] = _of_text(rotary)
        if (tied := published.take(TIED, None)) is not None:
            attributes[TIED] = tied
        published.finish(_OTHER_PARTS.search)
        return attributes

    def table_name(self, name: str) -> str | None:
        """Return the name in the family's table of an array of the folder; None for one that is left unread."""
        if _UNREAD.match(name):
            return None
        for prefix, table_prefix in self.prefixes:
            if name.startswith(prefix):
                return table_prefix + name.removeprefix(prefix)
        return name


def _of_text(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary positions without sections for time, height and width, which are all equal for text."""
    parameters = {name: value for name, value in rotary.items() if name not in ("mrope_section", "mrope_interleaved")}
    return parameters | {name: "default" for name in ("type", "rope_type") if parameters.get(name) == "mrope"}
