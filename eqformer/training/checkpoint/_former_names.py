"""Names that arrays of a state had in checkpoints of older revisions."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping


# Fields that a block had for its sublayers, in the order in which it ran them. Each is now an element of its tuple.
_FIELDS = ("mixer", "cross", "feed_forward", "gated_input", "scalar")
# Patterns in former names, from the field of a block on, and the text that takes their place. `{mixer}` and the like
# stand for the index of the sublayer that was in this field.
_RENAMED = (
    (r"mixer\.mixers\.(?P<branch>\d+)", r"sublayers.{mixer}.branches.\g<branch>"),
    (r"feed_forward\.layer\.dense", r"sublayers.{feed_forward}.branches.0"),
    (r"feed_forward\.layer\.routed", r"sublayers.{feed_forward}.branches.1"),
    (r"scalar", r"sublayers.{scalar}.factor"),
    *((field, f"sublayers.{{{field}}}") for field in _FIELDS[:-1]),
    (r"mixer", r"branches.0"),  # A parallel block had two fields of the same names.
    (r"feed_forward", r"branches.1"),
)
# Arrays of an attention that moved into one of its parts: sinks, and norms that follow the rotation.
_MOVED = (("sinks", "scores.sinks"), ("query_norm", "rotary.query_norm"), ("key_norm", "rotary.key_norm"))


def match_saved_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return a dict from the current name of each saved array to its saved name.

    A saved name that is not among the `wanted` names is a former name if its current name is among them; else it stays.
    """
    indices = _sublayer_indices(saved)
    return {name if name in wanted else _current_name(name, wanted, indices): name for name in saved}


def _current_name(name: str, wanted: Collection[str], indices: Mapping[str, Mapping[str, int]]) -> str:
    in_blocks = [name, *_names_in_blocks(name, indices)]
    candidates = [*in_blocks, *(moved for renamed in in_blocks for moved in _names_in_parts(renamed))]
    return next((candidate for candidate in candidates if candidate in wanted), name)


def _names_in_blocks(name: str, indices: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the names that an array of a block may have among the block's sublayers."""
    for former, current in _RENAMED:
        match = re.fullmatch(rf"(?P<block>(?:.*?\.)??){former}(?P<end>(?:\..+)?)", name)
        if match and match["block"] in indices:  # else a field of a mixer, say, has the name of a block's
            yield match["block"] + match.expand(current.format(**indices[match["block"]])) + match["end"]


def _names_in_parts(name: str) -> Iterator[str]:
    """Yield the names that an array of an attention may have among the attention's parts."""
    for former, current in _MOVED:
        if match := re.fullmatch(rf"(?P<attention>(?:.*\.)?){former}(?P<end>(?:\..+)?)", name):
            yield match["attention"] + current + match["end"]


def _sublayer_indices(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return for each block, by the beginning of its arrays' names, the index of the sublayer of each field.

    A block always had a mixer, even if it is one without arrays.
    """
    fields_by_block: dict[str, set[str]] = {}
    for name in names:
        if match := re.fullmatch(rf"((?:.*?\.)??)({'|'.join(_FIELDS)})(\..+)?", name):
            fields_by_block.setdefault(match[1], {"mixer"}).add(match[2])
    ordered = {block: [name for name in _FIELDS if name in fields] for block, fields in fields_by_block.items()}
    return {block: {field: index for index, field in enumerate(fields)} for block, fields in ordered.items()}
