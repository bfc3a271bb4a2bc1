"""From a recipe to its text: sources, their tokens in the folder that a user's runs share, and batches."""

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from recipes import Recipe

from eqformer import data
from eqformer.parallel import is_first_process
from support.run_directory import RunDirectory
from support.screen import Screen, warn
from support.user_folder import user_folder


SHARED = "EQFORMER_TOKENS"  # the environment variable that names the shared folder
_HUB = "hub:"


def sources_of(recipe: Recipe) -> dict[str, tuple[data.TextSource, float]]:
    """The recipe's documents, by the names of their sources, each with its weight."""
    text = recipe.text
    given = {"--data": recipe.data, "--text.hub": text.hub, "--text.mix": " ".join(text.mix) or None}
    if len(several := [f"{flag} {value}" for flag, value in given.items() if value is not None]) > 1:
        raise ValueError(f"{' '.join(several)}: a run reads one of them; leave the others out.")
    with _one_line_each():
        return _sources(recipe)


def _sources(recipe: Recipe) -> dict[str, tuple[data.TextSource, float]]:
    text = recipe.text
    if not text.mix:
        source = _source(recipe.data if text.hub is None else f"{_HUB}{text.hub}", text.field)
        return {source.name: (source, 1.0)}
    weights = dict(map(_weighted, text.mix))
    if len(weights) < len(text.mix):
        raise ValueError(f"--text.mix {' '.join(text.mix)}: a text is named twice; give each once, with one weight.")
    sources = {place: _source(place, text.field) for place in weights}
    short = len({source.name for source in sources.values()}) == len(sources)  # for messages and metrics
    return {source.name if short else place: (source, weights[place]) for place, source in sources.items()}


def _weighted(part: str) -> tuple[str, float]:
    """The place and the weight of `PLACE=WEIGHT`."""
    place, _, number = part.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not place.removeprefix(_HUB) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"--text.mix {part}: give PATH=WEIGHT or hub:NAME=WEIGHT, where the weight is above 0.")
    return place, weight


def _source(place: str | Path | None, field: str) -> data.TextSource:
    """The documents at a path, or of a dataset (`hub:NAME`); by default the standard library's."""
    if place is None:
        return data.standard_library()
    if str(place).startswith(_HUB):
        return data.hub(str(place).removeprefix(_HUB), field=field)
    return data.files(place, field=field)


def open_texts(
    recipe: Recipe,
    sources: Mapping[str, tuple[data.TextSource, float]],
    tokenizer: data.Tokenizer,
    directory: RunDirectory,
    screen: Screen,
) -> data.Corpus:
    """The texts as batches of the recipe's shape; their tokens as they are kept, or made now."""
    folders, text = [*shared_folder(), directory.data], recipe.text
    before = _size(folders[0])
    with screen.bar() as progress, _one_line_each():
        corpus = data.open_corpus(
            {name: source for name, (source, _) in sources.items()},
            tokenizer,
            folders,
            seq=recipe.seq,
            batch=recipe.batch,
            seed=recipe.seed,
            packing=text.packing,
            weights={name: weight for name, (_, weight) in sources.items()} if text.mix else None,
            validation=text.validation,
            vocab=recipe.model.vocab,
            progress=lambda what, done, total: progress(f"reading {what}", done, total),
        )
    if (size := _size(folders[0])) > before and folders[0] != directory.data:
        screen.note(f"the tokens are in {folders[0]}, which all runs share ({size / 1e6:,.1f} MB; it may be deleted)")
    return corpus


def _size(folder: Path) -> int:
    """The bytes of the folder's tokens."""
    size = 0
    with suppress(OSError):  # another run's files may come and go
        for file in folder.rglob("*.bin"):
            size += file.stat().st_size
    return size


def shared_folder() -> list[Path]:
    """The folder of tokens that all runs of a user share, or what `EQFORMER_TOKENS` names; none without a home."""
    if chosen := os.environ.get(SHARED):
        return [Path(chosen)]
    folder = user_folder("tokens")
    return [] if folder is None else [folder]


@contextmanager
def _one_line_each() -> Iterator[None]:
    """Show the library's warnings inside on a line of their own, once for all processes of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught if is_first_process() else ():
        warn(str(warning.message))
