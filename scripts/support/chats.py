"""Runs on conversations: their encoder, their samples, and a look at what is learned of one."""

import dataclasses
import functools
from pathlib import Path

from recipes import Recipe
from rich.text import Text as StyledText

from eqformer import data
from eqformer.text import load_conversation_encoder
from support.published import published_files, recipe_tokenizer, Tokenizer
from support.run_directory import RunDirectory
from support.screen import Screen


_PROMPT = "Why is the sky blue?"
_TEXT_FORMS = ("text", "preferences", "preferences of messages")  # --text.field may name a field of preferences.


@functools.cache
def detect_form(path: Path) -> str:
    """Return `data.detect_form` of a path, whose files are listed once in a command."""
    return data.detect_form(path)


def open_chats(recipe: Recipe, path: Path) -> data.TextSource:
    """Return the conversations of a path, or its pairs of completions for a loss of preferences."""
    return data.preferences(path) if recipe.compares_pairs else data.conversations(path)


def chat_paths(recipe: Recipe) -> list[Path]:
    """Return the recipe's files and folders of conversations, or of prompts and completions.

    Raises a `ValueError` if only some of its texts are such.
    """
    if recipe.compares_pairs:
        if recipe.data is None:
            raise ValueError(f"--loss {recipe.loss}: pairs are read from a file or folder; give --data PAIRS.jsonl.")
        return [recipe.data]
    paths = [Path(part.rpartition("=")[0]) for part in recipe.text.mix if not part.startswith("hub:")]
    paths += [] if recipe.data is None else [recipe.data]
    chats = [path for path in paths if detect_form(path) not in _TEXT_FORMS]
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
    """Return the recipe with rows of whole conversations or pairs, and a question as the prompt of its samples."""
    prompt = _PROMPT if recipe.prompt == Recipe.prompt else recipe.prompt
    packing = "pairs" if recipe.compares_pairs else "documents"
    return dataclasses.replace(recipe, prompt=prompt, text=dataclasses.replace(recipe.text, packing=packing))


def chat_encoder(
    recipe: Recipe, tokenizer: Tokenizer, directory: RunDirectory | None = None
) -> data.ConversationEncoder | None:
    """Return the encoder of the recipe's conversations by the published model's template; None for plain text."""
    paths = chat_paths(recipe)
    if not paths:
        return None
    folder = published_files(recipe, directory)
    if folder is None:
        reason = "there is no published model"
        encoder = data.ConversationEncoder(tokenizer, None, loss_on=recipe.loss_on)
    else:
        reason = "the model was published without one"
        encoder = load_conversation_encoder(folder, tokenizer, loss_on=recipe.loss_on)
    if encoder.template is None and "messages" in detect_form(paths[0]):
        raise ValueError(
            f"--data {paths[0]}: conversations are written by a model's chat template, but {reason}; give --model of a "
            "chat model, or texts as prompt and completion."
        )
    return encoder


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
    document, shown = next(iter(open_chats(recipe, chat_paths(recipe)[0]))), StyledText()
    spans = encoder.mark_learned(document)
    for span in spans:
        piece = f"[[{span.text}]]" if span.is_learned and not screen.has_colors else span.text
        shown.append(piece, style="bold green" if span.is_learned else "dim")
    total = sum(span.tokens for span in spans)
    learned = sum(span.tokens for span in spans if span.is_learned)
    mark = "in colour" if screen.has_colors else "in [[brackets]]"
    screen.note(f"{document.name}: {total} tokens, of which {learned} are learned ({mark})")
    screen.console.print(shown)
