"""Runs on conversations: their encoder, their samples, and a look at what is learned of one."""

import dataclasses
import functools
from itertools import groupby
from pathlib import Path

import numpy as np
from recipes import Recipe
from rich.text import Text as StyledText

from eqformer import data, models
from eqformer.text import read_chat_template
from support.published import recipe_tokenizer, Tokenizer
from support.run_directory import RunDirectory
from support.screen import Screen


_PROMPT = "Why is the sky blue?"


@functools.cache
def detect_form(path: Path) -> str:
    """Return `data.detect_form` of a path, whose files are listed once in a command."""
    return data.detect_form(path)


def chat_paths(recipe: Recipe) -> list[Path]:
    """Return the recipe's files and folders of conversations, or of prompts and completions.

    Raises a `ValueError` if only some of its texts are such.
    """
    paths = [Path(part.rpartition("=")[0]) for part in recipe.text.mix if not part.startswith("hub:")]
    paths += [] if recipe.data is None else [recipe.data]
    chats = [path for path in paths if detect_form(path) != "text"]
    if chats and len(chats) < max(len(paths), len(recipe.text.mix)):
        raise ValueError(
            f"--text.mix {' '.join(recipe.text.mix)}: {chats[0]} has conversations, and others have text; give texts "
            "of one kind."
        )
    return chats


def reads_chats(recipe: Recipe) -> bool:
    """Return whether the recipe's text is conversations, or prompts and completions."""
    return bool(chat_paths(recipe))


def for_chats(recipe: Recipe) -> Recipe:
    """Return the recipe with rows of whole conversations, and a question as the prompt of its samples."""
    prompt = _PROMPT if recipe.prompt == Recipe.prompt else recipe.prompt
    return dataclasses.replace(recipe, prompt=prompt, text=dataclasses.replace(recipe.text, packing="documents"))


def chat_encoder(
    recipe: Recipe, tokenizer: Tokenizer, directory: RunDirectory | None = None
) -> data.ConversationEncoder | None:
    """Return the encoder of the recipe's conversations by the published model's template; None for plain text."""
    paths = chat_paths(recipe)
    if not paths:
        return None
    folder = recipe.published
    if folder is not None and directory is not None and directory.published.exists():
        folder = directory.published
    companions = None if folder is None else models.companion_folder(folder)
    template = None if companions is None else read_chat_template(companions)
    if template is None and "messages" in detect_form(paths[0]):
        reason = "the model was published without one" if companions else "there is no published model"
        raise ValueError(
            f"--data {paths[0]}: conversations are written by a model's chat template, but {reason}; give --model of a "
            "chat model, or texts as prompt and completion."
        )
    ends = [] if companions is None else models.read_eos_token_ids(companions)
    return data.ConversationEncoder(tokenizer, template, loss_on=recipe.loss_on, end_ids=ends)


def sample_prompt(
    recipe: Recipe, tokenizer: Tokenizer, encoder: data.ConversationEncoder | None
) -> tuple[list[int], tuple[int, ...]]:
    """Return the ids that a sample continues, and those that end it: the recipe's prompt as its data has prompts."""
    if encoder is None:
        return tokenizer.encode(recipe.prompt).tolist() or [tokenizer.end_of_text], (tokenizer.end_of_text,)
    if encoder.template is None or "messages" not in detect_form(chat_paths(recipe)[0]):
        return tokenizer.encode_prompt(recipe.prompt).tolist() or [tokenizer.end_of_text], encoder.end_ids
    text = encoder.template.render([{"role": "user", "content": recipe.prompt}])
    return tokenizer.encode_prompt(text, add_special_tokens=False).tolist(), encoder.end_ids


def show_example(recipe: Recipe, directory: RunDirectory, screen: Screen) -> None:
    """Print the first conversation of the recipe's data with the tokens that are learned in colour, or in brackets."""
    tokenizer = recipe_tokenizer(recipe, directory)
    encoder = chat_encoder(recipe, tokenizer, directory)
    if encoder is None:
        raise ValueError("--show-example: the text is no conversations, so all of it is learned; leave the flag out.")
    source = data.conversations(chat_paths(recipe)[0])
    document = next(iter(source))
    (example,) = encoder.encode_documents([document])
    learned, shown = example.weights > 0, StyledText()
    for is_learned, indices in groupby(range(len(example.ids)), key=lambda index: bool(learned[index])):
        piece = tokenizer.decode_prompt(example.ids[[*indices]])
        if is_learned:
            piece = piece if screen.has_colors else f"[[{piece}]]"
        shown.append(piece, style="bold green" if is_learned else "dim")
    count = int(np.sum(learned))
    mark = "in colour" if screen.has_colors else "in [[brackets]]"
    screen.note(f"{document.name}: {len(learned)} tokens, of which {count} are learned ({mark})")
    screen.console.print(shown)
