"""Convert a run to a published model, or the reverse: `python scripts/convert.py runs/default exported`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare()

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from support.command import entry

from eqformer import dataclass_to_json, models, read_utf8, training
from eqformer.recipes import check, published_recipe, Recipe, RunDirectory, Screen, setup, texts
from eqformer.text import export_run


@dataclasses.dataclass(frozen=True)
class Command:
    """Write the model of a run as a published folder, or a published model as a run.

    A published folder holds safetensors, config.json and tokenizer files, as transformers reads and writes them. A run
    is a folder that scripts/pretrain.py writes and resumes.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A run's folder (its latest checkpoint is read), a published folder, a GGUF file, or a name of the hub."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """The folder to write, which must not exist yet."""
    adapter: bool = False
    """Write only the low-rank changes of a run with --lora.rank, for peft; by default the changes are merged."""
    push: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME")] = None
    """Upload TARGET to the hub, with a model card that names base model, data, recipe and license (extra `hub`)."""
    license: str = "other"
    """The license in the model card, by its name on the hub, such as apache-2.0."""
    trust_recipe: bool = False
    """Run the Python file recipe.py of a run's folder if the recipe needs a class that this file defines."""


def convert(command: Command) -> None:
    """Write the target."""
    screen, source = Screen(), RunDirectory(command.source)
    if command.target.exists():
        raise ValueError(f"TARGET {command.target}: this path exists already; give a new folder.")
    if source.recipe.exists():
        _write_published(source, command, screen)
        return
    path = models.local_path(command.source)
    if not path.is_file() and not (path / "config.json").exists():
        raise ValueError(
            f"SOURCE {command.source}: this is neither a run (recipe.json) nor a published model (config.json, or a "
            "GGUF file); give a run or a published model."
        )
    if command.adapter:
        raise ValueError("--adapter: only a run has low-rank changes to write; leave --adapter out.")
    if command.push is not None:
        raise ValueError(f"--push {command.push}: only the model of a run is uploaded; leave --push out.")
    _write_run(command.source.absolute().name, published_recipe(path), RunDirectory(command.target), screen)


def _write_published(source: RunDirectory, command: Command, screen: Screen) -> None:
    (_, recipe), target = source.read(), command.target
    if command.adapter and command.push is not None:
        raise ValueError(f"--adapter --push {command.push}: only whole models are uploaded; leave one of the two out.")
    export_run(source.path, target, adapter=command.adapter)
    if command.adapter:
        screen.note(f"{target} holds the low-rank changes, for peft")
        return
    screen.note(f"{target} holds the published model\nsample     python scripts/sample.py --model {target}")
    if command.push is not None:
        commit = models.push(target, command.push, _model_card(source, recipe, command.license))
        screen.note(f"uploaded   {commit}")


def _model_card(source: RunDirectory, recipe: Recipe, license: str) -> models.ModelCard:
    """Return the model card of a run's model."""
    base = None
    if recipe.published is not None:
        base = models.hub_name(recipe.published) or Path(recipe.published).name
    texts = [part.rpartition("=")[0].removeprefix("hub:") for part in recipe.text.mix]
    texts += [str(text) for text in (recipe.text.hub, recipe.data) if text is not None]
    datasets = tuple(texts) or ("the standard library of Python",)
    return models.ModelCard(license, base, datasets, read_utf8(source.recipe))


def _write_run(name: str, recipe: Recipe, target: RunDirectory, screen: Screen) -> None:
    check(recipe)
    model = setup.load_published_model(recipe, None, screen)
    with target:
        target.claim(name, recipe)
        target.begin(name, recipe)
        texts.copy_published_files(recipe, target)
        metadata = training.run_metadata(
            recipe={"name": name, "recipe": dataclass_to_json(recipe)},
            step=0,
            data={},
            key=setup.make_keys(recipe).steps,
        )
        with target.checkpointer() as checkpointer:
            checkpointer.save({"model": model}, 0, metadata)
    screen.note(
        f"{target.path} holds the model as a run\n"
        f"sample     python scripts/sample.py --run-dir {target.path}\n"
        f"train      python scripts/pretrain.py --model {recipe.published} --run-dir {target.path}"
    )


main = entry(Command, convert)

if __name__ == "__main__":
    main(sys.argv[1:])
