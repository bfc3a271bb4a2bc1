"""From a recipe to its text: documents, their tokens in the folder that a user's runs share, and batches."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from recipes import Recipe

from eqformer import data
from support.run_directory import RunDirectory
from support.screen import Screen, warn


SHARED = "EQFORMER_TOKENS"  # the environment variable that names the shared folder


def source_of(recipe: Recipe) -> data.Source:
    """The recipe's documents."""
    if recipe.text.hub is not None and recipe.data is not None:
        raise ValueError(f"--data {recipe.data} --text.hub {recipe.text.hub}: a run reads one of them; leave one out.")
    if recipe.text.hub is not None:
        return data.hub(recipe.text.hub, field=recipe.text.field)
    if recipe.data is None:
        return data.standard_library()
    return data.files(recipe.data, field=recipe.text.field)


def open_text(
    recipe: Recipe, source: data.Source, tokenizer: data.Tokenizer, directory: RunDirectory, screen: Screen
) -> tuple[data.TokenStore, data.TokenStore]:
    """The tokens for training and for validation, as they are kept or made now."""
    folders = [*shared_folder(), directory.data]
    before = _size(folders[0])
    train = _open(recipe, source, tokenizer, folders, "train", screen)
    folders = folders[folders.index(train.path.parent) :]  # one that could not be written is not tried again
    validation = _open(recipe, source, tokenizer, folders, "validation", screen)
    if (size := _size(folders[0])) > before and folders[0] != directory.data:
        screen.note(f"the tokens are in {folders[0]}, which all runs share ({size / 1e6:,.1f} MB; it may be deleted)")
    return train, validation


def _open(
    recipe: Recipe,
    source: data.Source,
    tokenizer: data.Tokenizer,
    folders: list[Path],
    split: Literal["train", "validation"],
    screen: Screen,
) -> data.TokenStore:
    share = recipe.text.validation
    with screen.bytes(f"reading {source.name} ({split})") as show, _one_line_each():
        store = data.open_store(source, tokenizer, folders, split, validation=share, progress=show)
    data.check_vocab(store, recipe.model.vocab)
    return store


def _size(folder: Path) -> int:
    """The bytes of the folder's tokens."""
    size = 0
    with suppress(OSError):  # another run's files may come and go
        for file in folder.rglob("*.bin"):
            size += file.stat().st_size
    return size


def shared_folder() -> list[Path]:
    """The folder of tokens that all runs of a user share; none where the user has no home.

    It is what `EQFORMER_TOKENS` names, or else `eqformer/tokens` in the user's cache, by the XDG base directory
    specification.
    """
    if chosen := os.environ.get(SHARED):
        return [Path(chosen)]
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"  # the specification ignores relative ones
    except RuntimeError:
        return []
    return [cache / "eqformer" / "tokens"]


@contextmanager
def _one_line_each() -> Iterator[None]:
    """Show the library's warnings inside on a line of their own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        warn(str(warning.message))


def loader_of(recipe: Recipe, store: data.TokenStore) -> data.Loader:
    """Batches of the recipe's shape."""
    return data.Loader(store, seq=recipe.seq, batch=recipe.batch, seed=recipe.seed, packing=recipe.text.packing)
