"""Published models in the scripts: a run that starts from one, and the files that are exported with a run's model."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from recipes import Recipe

from eqformer import data, models, read_utf8, write_atomic
from eqformer.training import Optimization
from support.recipe_file import differences
from support.run_directory import EVERYTHING_ELSE, RunDirectory


Tokenizer = data.ByteTokenizer | data.FileTokenizer


def published_recipe(folder: Path, run: RunDirectory | None = None) -> Recipe:
    """Return the recipe that continues to train a published model, with a low learning rate.

    If the folder is gone, the copy of its configuration in the `run` that began from it is read.
    """
    folder = folder.absolute()
    if RunDirectory(folder).recipe.exists():
        raise ValueError(
            f"--model {folder}: this is a run, and a model is taken from a folder as published; write one of it with "
            f"scripts/convert.py {folder} FOLDER and give that, or let the run itself go on with --run-dir {folder}."
        )
    source = folder
    if run is not None and not folder.exists() and run.began_from(folder):
        source = run.published
    return Recipe(model=models.read_config(source), published=folder, optimizer=Optimization(learning_rate=1e-4))


def check_published(recipe: Recipe, run: RunDirectory | None = None) -> None:
    """Raise a `ValueError` if flags change the published model, or the one that the `run` began from."""
    if recipe.published is None:
        return
    changed = differences(published_recipe(recipe.published, run), recipe, EVERYTHING_ELSE)
    if changed:
        raise ValueError(
            f"--model {recipe.published}: the model is as it was published; leave out\n  " + "\n  ".join(changed)
        )


def recipe_tokenizer(recipe: Recipe, directory: RunDirectory | None = None) -> Tokenizer:
    """Return the recipe's tokenizer: --text.tokenizer, or the published model's, or bytes.

    A run has copies of both files, which are read once it has a checkpoint.
    """
    end_of_text = recipe.text.end_of_text
    if recipe.text.tokenizer is not None:
        file = recipe.text.tokenizer
        if directory is not None and directory.tokenizer.exists() and directory.checkpointer().steps:
            file = directory.tokenizer
        return data.FileTokenizer(file, end_of_text=end_of_text)
    if recipe.published is None:
        return _byte_tokenizer(end_of_text)
    folder = recipe.published
    if directory is not None and directory.published.exists():
        folder = directory.published
    return published_tokenizer(folder, end_of_text)


def published_tokenizer(model: Path, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer of a published folder or a GGUF file; bytes if it has none and the model 256 ids."""
    folder = companion_folder(model)
    file, ends = folder / "tokenizer.json", models.read_eos_token_ids(folder)
    if file.exists():
        return data.FileTokenizer(file, end_of_text=next(iter(ends), None) if end_of_text is None else end_of_text)
    if models.read_config(model).vocab == data.ByteTokenizer.vocab:
        return _byte_tokenizer(end_of_text)
    raise ValueError(f"--model {model}: the folder has no tokenizer.json; put the model's own there.")


def companion_folder(path: Path) -> Path:
    """Return the folder of a published model's tokenizer and settings."""
    return _unpack_gguf(path) if path.is_file() else path


@functools.cache
def _unpack_gguf(file: Path) -> Path:
    """Write the tokenizer and settings of a GGUF file to a folder that is removed when the process ends."""
    files, folder = models.gguf_companion_files(file), Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def _byte_tokenizer(end_of_text: str | None) -> Tokenizer:
    if end_of_text is not None:
        raise ValueError(
            f"--text.end-of-text {end_of_text}: bytes end a text with 0; leave it out, or give --text.tokenizer."
        )
    return data.ByteTokenizer()


def copy_companions(recipe: Recipe, directory: RunDirectory) -> None:
    """Copy the tokenizer's file, and the files that the model was published with except weights, into the run."""
    if (file := recipe.text.tokenizer) is not None and not directory.checkpointer().steps:
        write_atomic(directory.tokenizer, lambda part: shutil.copyfile(file, part))
    if recipe.published is None or directory.published.exists():
        return
    part = directory.published.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    companions = companion_folder(recipe.published)
    for name in ("config.json", *models.COMPANION_FILES):
        if (companions / name).exists():
            shutil.copyfile(companions / name, part / name)
    part.rename(directory.published)


def save_options(recipe: Recipe, directory: RunDirectory) -> dict[str, Any]:
    """Return the arguments that `eqformer.models.save` needs beside a run's model."""
    if (directory.published / "config.json").exists():
        return {"like": directory.published}
    if directory.published.exists():  # files of a GGUF file, which has no config.json
        ends = models.read_eos_token_ids(directory.published)
        files = {file.name: read_utf8(file) for file in directory.published.iterdir()}
        return {"config": recipe.model, "attributes": {"eos_token_id": ends or None}, "files": files}
    tokenizer = recipe_tokenizer(recipe, directory)
    return {
        "config": recipe.model,
        "attributes": {"eos_token_id": tokenizer.end_of_text, "bos_token_id": None, "pad_token_id": None},
        "files": data.tokenizer_files(tokenizer, max_length=recipe.seq),
    }
