"""The text of a recipe: tokenizer, published files, conversations, sources, and tokens that runs share."""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import data, models, nn
from .._files import dataclass_differences, read_json, write_atomic
from .._prepare import token_cache
from ..text import (
    load_conversation_encoder,
    load_tokenizer,
    read_label_names,
    read_mask_id,
    read_pooling,
    reads_token_types,
)
from ..training import Optimization
from ._recipe import Labels, Recipe
from ._report import print_warnings, Screen
from ._run_directory import ALL_BUT_THE_MODEL, RunDirectory


Tokenizer = data.ByteTokenizer | data.FileTokenizer


def published_recipe(source: str | Path, run: RunDirectory | None = None, **fields: Any) -> Recipe:
    """Return the recipe that continues to train a published model, with a low learning rate.

        recipe = published_recipe("HuggingFaceTB/SmolLM2-135M-Instruct", data="chats.jsonl", lora=Lora(rank=8))

    Args:
        source: The folder of a published model, a GGUF file, or a name of the hub.
        run: A run that began from the folder; if the folder is gone, the run's copy of its configuration is read.
        fields: Further fields of the `Recipe`.
    """
    folder = Path(source)
    begun = run if run is not None and run.began_from(folder.absolute()) else None
    folder = (models.local_path(folder) if begun is None else folder).absolute()
    if RunDirectory(folder).recipe.exists():
        raise ValueError(
            f"--model {folder}: this is the folder of a run, and --model needs a published model; write the model with "
            f"scripts/convert.py {folder} FOLDER and give --model FOLDER, or resume the run with --run-dir {folder}."
        )
    config = models.read_config(folder if begun is None or folder.exists() else begun.published)
    return Recipe(**{"model": config, "published": folder, "optimizer": Optimization(learning_rate=1e-4), **fields})


def check_published(recipe: Recipe, run: RunDirectory | None = None) -> None:
    """Raise a `ValueError` if flags change the published model, or the model from which the `run` began."""
    if recipe.published is None:
        return
    changed = dataclass_differences(published_recipe(recipe.published, run), recipe, ignored=ALL_BUT_THE_MODEL)
    if changed:
        raise ValueError(
            f"--model {recipe.published}: a published model cannot be changed; leave out\n  " + "\n  ".join(changed)
        )


def recipe_tokenizer(recipe: Recipe, directory: RunDirectory | None = None) -> Tokenizer:
    """Return the recipe's tokenizer: --text.tokenizer, or the published model's tokenizer, or bytes.

    A run has copies of these files. The copies are read instead, because the originals may be gone. The copy of
    --text.tokenizer is read only if the run has a checkpoint.
    """
    end_of_text = recipe.text.end_of_text
    if recipe.text.tokenizer is not None:
        copy = None if directory is None else directory.copied_tokenizer(recipe)
        return _open_tokenizer(copy or recipe.text.tokenizer, end_of_text=end_of_text)
    folder = published_files(recipe, directory)
    has_file = folder is not None and (models.companion_folder(folder) / "tokenizer.json").exists()
    if end_of_text is not None and not has_file:
        raise ValueError(
            f"--text.end-of-text {end_of_text}: with bytes as tokens, the byte 0 ends a text; leave --text.end-of-text "
            "out, or give --text.tokenizer."
        )
    return data.ByteTokenizer() if folder is None else load_tokenizer(folder, end_of_text=end_of_text)


def published_files(recipe: Recipe, directory: RunDirectory | None = None) -> Path | None:
    """Return the folder of the published model that the recipe trains, or the run's copy of the folder's files.

    The result is None if the recipe trains no published model.
    """
    if recipe.published is not None and directory is not None and directory.published.exists():
        return directory.published
    return None if recipe.published is None else Path(recipe.published)


def complete_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe as its run stores it: with absolute paths, the packing, the pooling and the names of labels."""
    if recipe.from_run is not None:
        recipe = dataclasses.replace(recipe, from_run=Path(recipe.from_run).absolute())
    if recipe.published is not None:  # An absolute path, so that the run can be resumed from any directory.
        recipe = dataclasses.replace(recipe, published=models.local_path(recipe.published).absolute())
    if recipe.loss == "contrastive" and recipe.contrastive.pooling is None:
        pooling: Any = "mean" if recipe.published is None else read_pooling(recipe.published)
        recipe = dataclasses.replace(recipe, contrastive=dataclasses.replace(recipe.contrastive, pooling=pooling))
    for read_file in (_open_tokenizer, _detect_form):  # The files may have changed since an earlier run of the process.
        read_file.cache_clear()
    if recipe.loss == "classification":
        recipe = dataclasses.replace(recipe, classification=_complete_labels(recipe))
    return for_chats(recipe) if reads_chats(recipe) else recipe


def stored_formats(recipe: Recipe, directory: RunDirectory | None = None) -> Mapping[str, Any]:
    """Return the formats of the recipe's quantized weights (`nn.quantized_formats`).

    The formats are read from the run's copy or, if there is no copy, from the published model.
    """
    if directory is not None and directory.quantized.exists():
        return read_json(directory.quantized)
    assert recipe.published is not None
    return nn.quantized_formats(models.load_shapes(recipe.published, weights="quantized"))


def _complete_labels(recipe: Recipe) -> Labels:
    """Return the recipe's options of the classifier, with the names of labels, and the pooling of a published one."""
    options, published = recipe.classification, recipe.published
    if published is None or not models.is_classifier(published):
        return dataclasses.replace(options, labels=options.labels or data.list_label_names(chat_paths(recipe)))
    classifier = models.read_classifier(published)
    if classifier.classifies_tokens:
        raise ValueError(
            f"--model {published} --loss classification: the published classifier scores each token, not a text; take "
            "a classifier of texts, or a model without a classifier."
        )
    if options.pooling not in (None, classifier.pooling):
        pooling = "as its family does" if classifier.pooling is None else f"by {classifier.pooling}"
        raise ValueError(
            f"--model {published} --classification.pooling {options.pooling}: the published classifier pools texts "
            f"{pooling}; leave the pooling out."
        )
    labels = options.labels or read_label_names(published)
    return dataclasses.replace(options, labels=labels, pooling=classifier.pooling)


def check_encoder_loss(recipe: Recipe, directory: RunDirectory | None) -> None:
    """Raise a `ValueError` for options of text encoders and of masking that do not suit the recipe's loss."""
    for field, loss in {"contrastive": "contrastive", "masking": "mlm", "classification": "classification"}.items():
        options = getattr(recipe, field)
        default = type(options)()
        if field == "masking" and recipe.loss == "block-diffusion":
            # This loss reads the mask token, but no other option of masking.
            default = dataclasses.replace(default, token=options.token)
        if recipe.loss != loss and options != default:
            raise ValueError(f"--loss {recipe.loss}: --{field} is for --loss {loss}; leave --{field} out.")
    if recipe.loss == "block-diffusion":
        known_mask_id(recipe, recipe_tokenizer(recipe, directory), directory)
    if recipe.writes_text:
        return
    if recipe.evaluate_every:
        raise ValueError(
            f"--loss {recipe.loss} --evaluate-every: a text encoder writes no text; leave --evaluate-every out."
        )
    if recipe.loss == "mlm":
        if not 0 < recipe.masking.share <= 1:
            raise ValueError(
                f"--masking.share {recipe.masking.share}: the share must be above 0 and at most 1; 0.3 is usual."
            )
        known_mask_id(recipe, recipe_tokenizer(recipe, directory), directory)
        return
    if recipe.text.hub or recipe.optimizer.z_loss:
        rows = "groups of texts" if recipe.loss == "contrastive" else "labelled texts"
        raise ValueError(
            f"--loss {recipe.loss}: {rows} are read from --data or --text.mix, and this loss has no z-loss; leave "
            "--text.hub and --optimizer.z-loss out."
        )
    if recipe.loss == "classification":
        _check_labels(recipe)
        return
    group = recipe.contrastive.group
    if group < 2 or recipe.batch % group or recipe.batch < 2 * group:
        raise ValueError(
            f"--contrastive.group {group} --batch {recipe.batch}: a group has at least two texts, an anchor and its "
            "positive, and a batch holds at least two whole groups; give a --batch, in texts, that is a multiple of "
            "the group."
        )


def _check_labels(recipe: Recipe) -> None:
    """Raise a `ValueError` for fewer than two different labels, or for more or fewer labels than the model has."""
    names = recipe.classification.labels
    flag = f"--classification.labels {' '.join(names)}"
    if len(names) < 2 or len({*names}) < len(names) or not all(name.strip() for name in names):
        raise ValueError(
            f"{flag}: a classifier needs at least two labels with different names; correct the names, or give rows "
            "with at least two labels."
        )
    if recipe.published is None or not models.is_classifier(recipe.published):
        return
    if len(published := read_label_names(recipe.published)) != len(names):
        raise ValueError(
            f"{flag}: the published classifier has {len(published)} labels, {', '.join(published[:8])}; give "
            f"{len(published)} names, or the folder of a model without a classifier."
        )


def copy_published_files(recipe: Recipe, directory: RunDirectory) -> None:
    """Copy the recipe's files into the run: its tokenizer, the published model's files, and formats of weights.

    Weights are not copied; `quantized.json` has the formats of quantized weights.
    """
    if recipe.weights == "quantized" and not directory.quantized.exists():
        write_atomic(directory.quantized, json.dumps(stored_formats(recipe), indent=1) + "\n")
    if (file := recipe.text.tokenizer) is not None and not directory.checkpointer().steps:
        write_atomic(directory.tokenizer, lambda part: shutil.copyfile(file, part))
    if recipe.published is not None and not directory.published.exists():
        models.copy_companions(recipe.published, directory.published)


_PROMPT = "Why is the sky blue?"
# A run reads each tokenizer.json once, and lists the files of a path once; `complete_recipe` clears both caches.
_open_tokenizer = functools.cache(data.FileTokenizer)
_detect_form = functools.cache(data.detect_form)
# Forms of rows that can be read as plain texts; for preferences, --text.field names the field that is read.
_TEXT_FORMS = ("text", "preferences", "preferences of messages")
_MESSAGE_FORMS = (
    *("messages", "prompt and completion of messages"),
    *("preferences of messages", "labelled completion of messages"),
)


def open_chats(recipe: Recipe, path: Path) -> data.TextSource:
    """Return the rows of a path, in the form that the recipe's loss reads.

    The forms are conversations, pairs of completions, labelled completions, groups of texts, and labelled texts.
    """
    if recipe.loss == "contrastive":
        return data.text_groups(path, group=recipe.contrastive.group)
    if recipe.loss == "classification":
        return data.labelled_texts(path, recipe.classification.labels)
    if recipe.compares_pairs:
        return data.preferences(path)
    return data.labelled(path) if recipe.has_preferences else data.conversations(path)


def chat_paths(recipe: Recipe) -> list[Path]:
    """Return the recipe's files and folders whose rows are not plain texts, but have one of the forms of `open_chats`.

    Raises a `ValueError` if such rows and plain texts are mixed.
    """
    has_rows = recipe.has_preferences or recipe.has_text_rows
    if has_rows and recipe.data is None and not recipe.text.mix:
        names = {"contrastive": "groups of texts", "classification": "labelled texts", "kto": "labelled completions"}
        rows = names.get(recipe.loss, "pairs")
        raise ValueError(f"--loss {recipe.loss}: {rows} are read from a file or folder; give --data ROWS.jsonl.")
    of_hub = [part for part in recipe.text.mix if part.startswith("hub:")]
    if has_rows and of_hub:
        raise ValueError(
            f"--loss {recipe.loss} --text.mix {of_hub[0]}: datasets of the hub are read as plain texts, but this loss "
            "needs rows; give files or folders."
        )
    paths = [Path(part.rpartition("=")[0]) for part in recipe.text.mix if part not in of_hub]
    paths += [] if recipe.data is None else [Path(recipe.data)]
    chats = [path for path in paths if has_rows or _detect_form(path) not in _TEXT_FORMS]
    if chats and recipe.loss == "mlm":
        raise ValueError(
            f"--loss {recipe.loss} --data {chats[0]}: only plain texts are masked, but this file has conversations."
        )
    # `recipe.text.mix` also counts data sets of the hub, which have plain texts and are not in `paths`.
    if chats and len(chats) < max(len(paths), len(recipe.text.mix)):
        raise ValueError(
            f"--text.mix {' '.join(recipe.text.mix)}: {chats[0]} has conversations, and other sources have plain text; "
            "give sources of one kind."
        )
    return chats


def reads_chats(recipe: Recipe) -> bool:
    """Return whether the recipe reads rows of `open_chats` (conversations, completions, ...), not plain text."""
    return bool(chat_paths(recipe))


def for_chats(recipe: Recipe) -> Recipe:
    """Return the recipe with the packing for rows of `open_chats`, and with a question as the prompt of its samples."""
    prompt = _PROMPT if recipe.prompt == Recipe.prompt else recipe.prompt
    packing = "pairs" if recipe.compares_pairs else "labelled" if recipe.has_preferences else "documents"
    packing = {"contrastive": "groups", "classification": "classes"}.get(recipe.loss, packing)
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
        reason = "the model was published without a chat template"
        encoder = load_conversation_encoder(folder, tokenizer, loss_on=recipe.loss_on)
    if encoder.template is None and _detect_form(paths[0]) in _MESSAGE_FORMS:
        raise ValueError(
            f"--data {paths[0]}: conversations need a model's chat template, but {reason}; give --model of a chat "
            "model, or texts as prompt and completion."
        )
    return encoder


def row_encoder(recipe: Recipe, tokenizer: Tokenizer, directory: RunDirectory | None = None) -> data.RowEncoder | None:
    """Return the encoder of the recipe's rows: conversations, completions or whole texts; None for plain text."""
    if recipe.loss == "contrastive":
        return data.TextGroupEncoder(tokenizer, seq=recipe.seq)
    if recipe.loss == "classification":
        folder, labels = published_files(recipe, directory), recipe.classification.labels
        reads_types = models.shapes(recipe.model).reads_types and (folder is None or reads_token_types(folder))
        return data.LabelledTextEncoder(tokenizer, seq=recipe.seq, labels=labels, reads_types=reads_types)
    return chat_encoder(recipe, tokenizer, directory)


def run_mask_id(recipe: Recipe, tokenizer: Tokenizer, directory: RunDirectory | None) -> int | None:
    """Return the id of the mask token: of `--masking.token`, of the published model or of the tokenizer."""
    published = published_files(recipe, directory)
    folder = None if published is None else models.companion_folder(published)
    return read_mask_id(folder, tokenizer, recipe.masking.token)


def known_mask_id(recipe: Recipe, tokenizer: Tokenizer, directory: RunDirectory | None) -> int:
    """Return the id of the mask token; raises a `ValueError` if nothing names a mask token."""
    mask_id = run_mask_id(recipe, tokenizer, directory)
    if mask_id is None:
        token = recipe.masking.token
        option, names = "--masking.token", " or ".join(data.MASK_TOKENS)
        if token is not None:
            option, names = f"--masking.token {token}", token
        raise ValueError(
            f"{option}: the tokenizer has no special token {names}; give the name of its mask token, or a "
            "--text.tokenizer that has one."
        )
    return mask_id


def sample_prompt(
    recipe: Recipe, tokenizer: Tokenizer, encoder: data.ConversationEncoder | None
) -> tuple[list[int], tuple[int, ...]]:
    """Return the ids of a sample's prompt, in the form of the recipe's data, and the ids that end the sample."""
    if encoder is None:
        return tokenizer.encode(recipe.prompt).tolist() or [tokenizer.end_of_text], (tokenizer.end_of_text,)
    if encoder.template is None or _detect_form(chat_paths(recipe)[0]) not in _MESSAGE_FORMS:
        return tokenizer.encode_prompt(recipe.prompt).tolist() or [tokenizer.end_of_text], encoder.end_ids
    text = encoder.template.render([{"role": "user", "content": recipe.prompt}])
    return tokenizer.encode_prompt(text, add_special_tokens=False).tolist(), encoder.end_ids


_HUB = "hub:"


def open_sources(recipe: Recipe) -> dict[str, tuple[data.TextSource, float]]:
    """Return the recipe's sources of documents by name, each with its weight."""
    text = recipe.text
    sources = {"--data": recipe.data, "--text.hub": text.hub, "--text.mix": " ".join(text.mix) or None}
    if len(several := [f"{flag} {value}" for flag, value in sources.items() if value is not None]) > 1:
        raise ValueError(f"{' '.join(several)}: a run reads only one of these; leave the other flags out.")
    with print_warnings():
        return _open_sources(recipe)


def _open_sources(recipe: Recipe) -> dict[str, tuple[data.TextSource, float]]:
    text = recipe.text
    if not text.mix:
        source = _open_source(recipe.data if text.hub is None else f"{_HUB}{text.hub}", recipe)
        return {source.name: (source, 1.0)}
    weights = dict(map(_parse_weight, text.mix))
    if len(weights) < len(text.mix):
        raise ValueError(f"--text.mix {' '.join(text.mix)}: a source is named twice; name each source once.")
    sources = {path: _open_source(path, recipe) for path in weights}
    # Messages and metrics use the sources' short names if these are unique.
    is_unique = len({source.name for source in sources.values()}) == len(sources)
    return {source.name if is_unique else path: (source, weights[path]) for path, source in sources.items()}


def _parse_weight(part: str) -> tuple[str, float]:
    """Split `SOURCE=WEIGHT` into the source, a path or `hub:NAME`, and the weight."""
    path, _, number = part.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path.removeprefix(_HUB) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"--text.mix {part}: give PATH=WEIGHT or hub:NAME=WEIGHT, where the weight is above 0.")
    return path, weight


def _open_source(path: str | Path | None, recipe: Recipe) -> data.TextSource:
    """Return the documents at a path or of a dataset (`hub:NAME`); None: the sources of Python's standard library."""
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
    tokenizer: data.Tokenizer | data.RowEncoder,
    directory: RunDirectory,
    screen: Screen,
) -> data.Corpus:
    """Return the texts as batches of the recipe's shape; tokenize texts that no earlier run has tokenized."""
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
    """Return the number of bytes of a folder's token files."""
    size = 0
    with suppress(OSError):  # Another run may create or delete files meanwhile.
        for file in folder.rglob("*.bin"):
            size += file.stat().st_size
    return size


def shared_token_folders() -> list[Path]:
    """Return the folder of tokens that a user's runs share, in a list; an empty list if the user has no home folder."""
    folder = token_cache()
    return [] if folder is None else [folder]
