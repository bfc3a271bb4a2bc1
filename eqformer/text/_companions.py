"""Tokenizer and chat template beside a model's weights, in a published folder or in a GGUF file."""

import datetime
import warnings
from pathlib import Path

from .. import data, models


TOKENIZER = "tokenizer.json"


def load_tokenizer(source: str | Path, *, end_of_text: str | None = None) -> data.ByteTokenizer | data.FileTokenizer:
    """Load the tokenizer of a published folder or of a GGUF file.

    A folder without `tokenizer.json` has the tokenizer of bytes if its model has 256 ids. Raises a `ValueError` for any
    other folder without that file.

    Args:
        source: The folder, or the file.
        end_of_text: The token that ends a text; None: the first end id that the model's configs name or,
            if they name none, the token that `data.FileTokenizer` takes.
    """
    folder = models.companion_folder(source)
    file, ends = folder / TOKENIZER, models.read_eos_token_ids(folder)
    if file.exists():
        return data.FileTokenizer(file, end_of_text=next(iter(ends), None) if end_of_text is None else end_of_text)
    call = f"load_tokenizer({str(source)!r})"
    if models.read_config(source).vocab != data.ByteTokenizer.vocab:
        raise ValueError(f"{call}: the folder has no {TOKENIZER}; put the model's own there.")
    if end_of_text is not None:
        raise ValueError(
            f"{call}: end_of_text={end_of_text!r}: the byte tokenizer ends a text with id 0; leave it out."
        )
    return data.ByteTokenizer()


def load_conversation_encoder(
    source: str | Path,
    tokenizer: data.ByteTokenizer | data.FileTokenizer | None = None,
    *,
    loss_on: data.LossOn = "assistant",
) -> data.ConversationEncoder:
    """Load the encoder of conversations that a published chat model is trained on.

    Args:
        source: The published folder or the GGUF file, whose chat template and end ids the encoder has.
        tokenizer: The tokenizer; None: that of the source, see `load_tokenizer`.
        loss_on: The tokens that are trained on, as in `data.ConversationEncoder`.
    """
    folder = models.companion_folder(source)
    tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
    template, end_ids = read_chat_template(folder), models.read_eos_token_ids(folder)
    return data.ConversationEncoder(tokenizer, template, loss_on=loss_on, end_ids=end_ids)


def read_begin_id(folder: Path, tokenizer: data.ByteTokenizer | data.FileTokenizer) -> int | None:
    """Return the id of the `bos_token` that a published folder names; None without one."""
    name = data.read_special_tokens(folder).get("bos_token")
    if name is None or isinstance(tokenizer, data.ByteTokenizer):
        return None
    ids = tokenizer.encode_prompt(name, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else None


def read_chat_template(folder: Path) -> data.ChatTemplate | None:
    """Read the chat template of a published folder; None without one, and after a warning if it cannot be read."""
    if not data.has_chat_template(folder):
        return None
    try:
        return data.ChatTemplate(folder, now=datetime.datetime.now)
    except (ImportError, ValueError) as error:
        warnings.warn(f"{error} The model is loaded without chats.", stacklevel=3)
        return None
