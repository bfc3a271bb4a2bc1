"""Which family a folder holds, and the rules of its arrays."""

import dataclasses
from pathlib import Path

from ._config import Config
from ._families import FAMILIES, Numbers
from ._folder import CONFIG, Folder, read_json
from ._weights import Published, Weight


def numbers_of(path: Path) -> tuple[Published, Numbers]:
    """The family that a folder's `config.json` names, and its numbers there."""
    source = str(path / CONFIG)
    config = Config(read_json(path / CONFIG), source)
    kind = config.take("model_type")
    known = {family.published.model_type: family.published for family in FAMILIES.values() if family.published}
    if kind not in known:
        raise ValueError(f"{source}: model_type={kind!r} is not known; the families are {', '.join(sorted(known))}.")
    numbers = known[kind].read(config)
    config.finish()
    return known[kind], numbers


def rules_of(folder: Folder, published: Published, numbers: Numbers) -> list[Weight]:
    """The family's, without a prefix that the folder's names lack: of a model saved without its head's class."""
    rules, prefix = published.weights(numbers), published.prefix
    if any(name.startswith(prefix) for name in folder.names):
        return rules
    return [dataclasses.replace(rule, name=rule.name.removeprefix(prefix)) for rule in rules]


def published_of(numbers: Numbers) -> Published:
    """The format of a family by its numbers; raises a `ValueError` for a family that nobody publishes."""
    for family in FAMILIES.values():
        if isinstance(numbers, family.numbers) and family.published is not None:
            return family.published
    raise ValueError(f"save(numbers={type(numbers).__name__}(...)): this family is published in no common format.")
