"""Models of several kinds of data: where their text model stands in a folder, and what of the folder is left unread."""

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
# Attributes of the whole that say something of these parts alone.
_OTHERS = re.compile(r"image|video|vision|audio|multi_?modal|projector|^mm_|^spatial_|^out_hidden|^(boi|eoi|boa|eoa)_")


@dataclasses.dataclass(frozen=True)
class Tower:
    """A published model of several kinds of data of which a family is the text model.

    Its `config.json` has the text model's attributes in `text_config`; where the whole says `tie_word_embeddings` too,
    that is what counts, as in transformers.
    """

    model_type: str
    """The whole's name there."""
    text_type: str = ""
    """The text model's name there; empty: the family's."""
    missing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What transformers takes for attributes that `text_config` leaves out."""
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes of the family that have one value in it, whether or not `text_config` says so."""
    weights: tuple[Rule, ...] = ()
    """Variants of the family's table that the text model is published by here, and not where it stands alone."""
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."), ("language_model.", ""))
    """What the names of the text model's arrays begin with, and what they begin with in the family's table."""

    def attributes(self, whole: PublishedConfig) -> dict[str, Any]:
        """The text model's attributes, of the whole's; raises a `ValueError` for those of no known part."""
        found = {**self.missing, **self.always, **whole.nested(TEXT)}
        for name, value in self.always.items():
            if found[name] not in (value, None):
                whole.refuse(f"{TEXT}: {name}={found[name]!r}: of {self.model_type!r} it is always {value!r}.")
        found |= self.always
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(its := found.get(name), dict):
                found[name] = _of_text(its)
        if (tied := whole.take(TIED, None)) is not None:
            found[TIED] = tied
        whole.finish(_OTHERS.search)
        return found

    def own_name(self, name: str) -> str | None:
        """What the family's table calls an array of the folder; None for one that is left unread."""
        if _UNREAD.match(name):
            return None
        for theirs, own in self.prefixes:
            if name.startswith(theirs):
                return own + name.removeprefix(theirs)
        return name


def _of_text(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions without their sections for time, height and width, which of text are all the same number."""
    found = {name: value for name, value in rotary.items() if name not in ("mrope_section", "mrope_interleaved")}
    return found | {name: "default" for name in ("type", "rope_type") if found.get(name) == "mrope"}
