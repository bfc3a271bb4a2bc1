"""From a recipe to its text: sources, tokens in the folder that a user's runs share, and batches."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from recipes import Recipe

from eqformer import data, user_cache
from support.chats import chat_paths, open_chats
from support.run_directory import RunDirectory
from support.screen import print_warnings, Screen


SHARED = "EQFORMER_TOKENS"  # The environment variable that names the shared folder.
_HUB = "hub:"


def open_sources(recipe: Recipe) -> dict[str, tuple[data.TextSource, float]]:
    """Return the recipe's sources of documents by name, each with its weight."""
    text = recipe.text
    sources = {"--data": recipe.data, "--text.hub": text.hub, "--text.mix": " ".join(text.mix) or None}
    if len(several := [f"{flag} {value}" for flag, value in sources.items() if value is not None]) > 1:
        raise ValueError(f"{' '.join(several)}: a run reads one of them; leave the others out.")
    with print_warnings():
        return _open_sources(recipe)


def _open_sources(recipe: Recipe) -> dict[str, tuple[data.TextSource, float]]:
    text = recipe.text
    if not text.mix:
        source = _open_source(recipe.data if text.hub is None else f"{_HUB}{text.hub}", recipe)
        return {source.name: (source, 1.0)}
    weights = dict(map(_parse_weight, text.mix))
    if len(weights) < len(text.mix):
        raise ValueError(f"--text.mix {' '.join(text.mix)}: a text is named twice; give each once, with one weight.")
    sources = {path: _open_source(path, recipe) for path in weights}
    # Messages and metrics have short names, if these are unique.
    is_unique = len({source.name for source in sources.values()}) == len(sources)
    return {source.name if is_unique else path: (source, weights[path]) for path, source in sources.items()}


def _parse_weight(part: str) -> tuple[str, float]:
    """Return the path and the weight of `PATH=WEIGHT`."""
    path, _, number = part.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path.removeprefix(_HUB) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"--text.mix {part}: give PATH=WEIGHT or hub:NAME=WEIGHT, where the weight is above 0.")
    return path, weight


def _open_source(path: str | Path | None, recipe: Recipe) -> data.TextSource:
    """Return the documents at a path, or of a dataset (`hub:NAME`); by default those of the standard library."""
    if path is None:
        return data.standard_library()
    if str(path).startswith(_HUB):
        return data.hub(str(path).removeprefix(_HUB), field=recipe.text.field)
    if Path(path) in chat_paths(recipe):
        return open_chats(recipe, Path(path))
    return data.files(path, field=recipe.text.field)


def open_texts(
    recipe: Recipe,
    sources: Mapping[str, tuple[data.TextSource, float]],
    tokenizer: data.Tokenizer | data.ConversationEncoder,
    directory: RunDirectory,
    screen: Screen,
) -> data.Corpus:
    """Return the texts as batches of the recipe's shape; tokens that no run has made before are made now."""
    folders, text = [*shared_token_folders(), directory.data], recipe.text
    old_size = _token_bytes(folders[0])
    with screen.bar() as progress, print_warnings():
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
    for line in corpus.describe_cuts():
        screen.note(f"--seq {recipe.seq}: {line}")
    if (size := _token_bytes(folders[0])) > old_size and folders[0] != directory.data:
        screen.note(f"the tokens are in {folders[0]}, which all runs share ({size / 1e6:,.1f} MB; it may be deleted)")
    return corpus


def _token_bytes(folder: Path) -> int:
    """Return the bytes of the folder's tokens."""
    size = 0
    with suppress(OSError):  # another run's files may come and go
        for file in folder.rglob("*.bin"):
            size += file.stat().st_size
    return size


def shared_token_folders() -> list[Path]:
    """Return the folder of tokens that a user's runs share, or `EQFORMER_TOKENS`; an empty list without a home."""
    if path := os.environ.get(SHARED):
        return [Path(path)]
    folder = user_cache("tokens")
    return [] if folder is None else [folder]
