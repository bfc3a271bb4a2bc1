"""Published models in the scripts: a run that starts from one, and the files that are exported with a run's model."""

import shutil
from pathlib import Path

from recipes import Recipe

from eqformer import data, dataclass_differences, models, write_atomic
from eqformer.text import load_tokenizer
from eqformer.training import Optimization
from support.run_directory import EVERYTHING_ELSE, RunDirectory


Tokenizer = data.ByteTokenizer | data.FileTokenizer


def published_recipe(folder: Path, run: RunDirectory | None = None) -> Recipe:
    """Return the recipe that continues to train a published model, with a low learning rate.

    If the folder is gone, the copy of its configuration in the `run` that began from it is read.
    """
    if run is None or not run.began_from(folder.absolute()):
        folder = models.local_path(folder)
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
    changed = dataclass_differences(published_recipe(recipe.published, run), recipe, ignored=EVERYTHING_ELSE)
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
    folder = published_files(recipe, directory)
    has_file = folder is not None and (models.companion_folder(folder) / "tokenizer.json").exists()
    if end_of_text is not None and not has_file:
        raise ValueError(
            f"--text.end-of-text {end_of_text}: bytes end a text with 0; leave it out, or give --text.tokenizer."
        )
    return data.ByteTokenizer() if folder is None else load_tokenizer(folder, end_of_text=end_of_text)


def published_files(recipe: Recipe, directory: RunDirectory | None = None) -> Path | None:
    """Return the published model that the recipe trains, or the run's copy of its files; None without one."""
    if recipe.published is not None and directory is not None and directory.published.exists():
        return directory.published
    return recipe.published


def copy_companions(recipe: Recipe, directory: RunDirectory) -> None:
    """Copy the tokenizer's file, and the files that the model was published with except weights, into the run."""
    if (file := recipe.text.tokenizer) is not None and not directory.checkpointer().steps:
        write_atomic(directory.tokenizer, lambda part: shutil.copyfile(file, part))
    if recipe.published is not None and not directory.published.exists():
        models.copy_companions(recipe.published, directory.published)
