"""`load`: a published model with its tokenizer and chat template."""

import datetime
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
from jax.typing import DTypeLike

from .. import data, generation, models, nn, parallel
from ._llm import LLM


def load(
    source: str | Path,
    *,
    plan: parallel.Plan | None = None,
    dtype: DTypeLike | None = None,
    weights: str = "decoded",
    predictor: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LLM:
    """Load a published model with its tokenizer and chat template: a folder, or one file of GGUF.

    Raises a `ValueError` for a path that does not exist, for a model that does not fit the plan, for a folder without
    `tokenizer.json`, and for what `models.load` refuses.

    Args:
        source: The folder, or the file.
        plan: The plan that shards the model over a mesh; None: one device. The text is the same.
        dtype: The dtype of all weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored, in less memory; `"decoded"` decodes them.
        predictor: Whether to read the module that predicts a further token too, for `generate(draft="mtp")`.
        progress: A function that is called with the bytes read so far, and in all.
    """
    if not Path(source).exists():
        raise ValueError(
            f"load({str(source)!r}): there is no such file or folder; nothing is downloaded, so give the folder that a "
            "download made (hf download OWNER/NAME --local-dir FOLDER)."
        )
    if plan is not None:  # The model is compared with the plan before its arrays are read.
        parallel.ShardedModel(models.shapes(models.read_config(source)), plan)
    tokenizer, folder = load_tokenizer(source), models.companion_folder(source)
    model = models.load(source, plan=plan, dtype=dtype, weights=weights, predictor=predictor, progress=progress)
    ends = sorted({tokenizer.end_of_text, *models.read_eos_token_ids(folder)})
    return LLM(prepare_to_decode(model, plan), tokenizer, read_chat_template(folder), tuple(ends))


def load_tokenizer(source: str | Path, *, end_of_text: str | None = None) -> data.ByteTokenizer | data.FileTokenizer:
    """Load the tokenizer of a published folder or of a GGUF file.

    A folder without `tokenizer.json` has the tokenizer of bytes if its model has 256 ids. Raises a `ValueError` for any
    other folder without that file.

    Args:
        source: The folder, or the file.
        end_of_text: The token that ends a text; None: the model's own.
    """
    folder = models.companion_folder(source)
    file, ends = folder / "tokenizer.json", models.read_eos_token_ids(folder)
    if file.exists():
        return data.FileTokenizer(file, end_of_text=next(iter(ends), None) if end_of_text is None else end_of_text)
    call = f"load_tokenizer({str(source)!r})"
    if models.read_config(source).vocab != data.ByteTokenizer.vocab:
        raise ValueError(f"{call}: the folder has no tokenizer.json; put the model's own there.")
    if end_of_text is not None:
        raise ValueError(f"{call}: end_of_text={end_of_text!r}: bytes end a text with 0; leave it out.")
    return data.ByteTokenizer()


def read_chat_template(folder: Path) -> data.ChatTemplate | None:
    """Read the chat template of a published folder; None without one, and after a warning if it cannot be read."""
    if not data.has_chat_template(folder):
        return None
    try:
        return data.ChatTemplate(folder, now=datetime.datetime.now)
    except (ImportError, ValueError) as error:
        warnings.warn(f"{error} The model is loaded without chats.", stacklevel=3)
        return None


def prepare_to_decode(model: nn.LanguageModel, plan: parallel.Plan | None) -> generation.Model:
    """Return the model as it decodes fastest on the devices where it is, under the plan if there is one."""
    platform, chip = jax.default_backend(), jax.devices()[0].device_kind
    if plan is None:
        return generation.unstack_for_platform(model, platform, chip)
    if not plan.is_pipelined:
        split = plan.size(parallel.TENSOR) * plan.size(parallel.FSDP)
        model = plan.shard(generation.unstack_for_platform(model, platform, chip, devices=split))
    return parallel.ShardedModel(model, plan)
