"""`load`: the model of a published folder, a GGUF file or a run, with its tokenizer and chat template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .. import data, generation, models, parallel, training
from ._companions import load_tokenizer, MODULES, read_begin_id, read_chat_template
from ._llm import LLM, prepare_to_decode
from ._run_folder import (
    decode_run_weights,
    is_run,
    load_run_classifier,
    load_run_encoder,
    open_run_tokenizer,
    read_run_recipe,
    restore_run_model,
)
from ._text_classifier import load_classifier
from ._text_encoder import load_encoder


_MODEL_FILES = ("config.json", "adapter_config.json", MODULES)


def load(
    source: str | Path,
    *,
    plan: parallel.Plan | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: str = "decoded",
    predictor: bool = False,
    throughput: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LLM | Any:
    """Load a model with its tokenizer: an `LLM`, a `TextEncoder` or a `TextClassifier`.

    A folder holds a classifier if its `config.json` names a model `ForSequenceClassification` or
    `ForTokenClassification`. It holds a text encoder if it has the `modules.json` of sentence-transformers, or if its
    model is an encoder for masked tokens. `load_llm`, `load_encoder` and `load_classifier` load only one of the three
    kinds, and raise a `ValueError` for the others.

    Args:
        source: A published folder, one file of GGUF, the folder of a run, or the name of a model of the hub.
        plan: The plan that shards the model over a mesh; None: one device.
        dtype: The dtype of all weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored; `"decoded"` decodes them. The quantized
            weights of a run are decoded with its low-rank changes merged.
        predictor: Whether an `LLM` also reads the module that predicts a further token.
        throughput: Whether an `LLM`'s programs may take longer to compile if decoding is faster then.
        progress: A function that is called with the number of bytes read so far, and of all bytes.
    """
    path = _find_source(f"load({str(source)!r})", source)
    is_published = path.is_dir() and not is_run(path)
    is_classifier = is_published and models.is_classifier(path)
    is_encoder = is_published and ((path / MODULES).exists() or models.is_encoder(path))
    call = f"load({str(source)!r})"
    run = read_run_recipe(path) if path.is_dir() and is_run(path) else None
    if run is not None and (run.is_of_encoder or run.classifier is not None):
        if dtype is not None or weights != "decoded" or predictor or throughput:
            raise ValueError(
                f"{call}: a run's text encoder or classifier has no dtype, weights, predictor or throughput to choose."
            )
        return load_run_encoder(path, plan) if run.is_of_encoder else load_run_classifier(path, plan)
    if not is_classifier and not is_encoder:
        return _load_llm(call, path, plan, dtype, weights, predictor, throughput, progress)
    if predictor or throughput:
        raise ValueError(
            f"load({str(source)!r}): the folder holds a text encoder or a classifier, which writes no text; leave out "
            "predictor and throughput."
        )
    load_texts = load_classifier if is_classifier else load_encoder
    return load_texts(source, plan=plan, dtype=dtype, weights=weights, progress=progress)


def load_llm(
    source: str | Path,
    *,
    plan: parallel.Plan | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: str = "decoded",
    predictor: bool = False,
    throughput: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LLM:
    """Load a language model with its tokenizer and chat template.

    Raises a `ValueError` for a path that does not exist, for a text encoder, for a model that does not fit the plan,
    for a folder without `tokenizer.json`, and for what `models.local_path`, `models.load` or `load_run_model` refuse.

    Args:
        source: A published folder, one file of GGUF, the folder of a run (the model of its latest checkpoint), or the
            name of a model of the hub, such as `"HuggingFaceTB/SmolLM2-135M-Instruct"` (see `models.local_path`).
        plan: The plan that shards the model over a mesh; None: one device. The text is the same.
        dtype: The dtype of all weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored, in less memory; `"decoded"` decodes them,
            and merges the low-rank changes of a run into them.
        predictor: Whether to read the module that predicts a further token too, for `generate(draft="mtp")`.
        throughput: Whether programs may take longer to compile if decoding is faster then: on a CPU, layers whose
            weights fit into no cache are unstacked (see `generation.unstack_for_platform`).
        progress: A function that is called with the number of bytes read so far, and of all bytes.
    """
    call = f"load_llm({str(source)!r})"
    return _load_llm(call, _find_source(call, source), plan, dtype, weights, predictor, throughput, progress)


def _find_source(call: str, source: str | Path) -> Path:
    """Return the local path of a model; raise a `ValueError` for a path that does not exist or holds no model."""
    path = models.local_path(source)
    if not path.exists():
        raise ValueError(
            f"{call}: there is no such file or folder, and this is no name of a model of the hub "
            "(OWNER/NAME); correct it."
        )
    if path.is_dir() and not is_run(path) and not any((path / file).exists() for file in _MODEL_FILES):
        raise ValueError(
            f"{call}: the folder has no config.json, so it holds no published model, and it is not the folder of a "
            "run; give a folder with config.json and weights, a file of GGUF, or a run's folder."
        )
    return path


def _load_llm(
    call: str,
    path: Path,
    plan: parallel.Plan | None,
    dtype: jax.typing.DTypeLike | None,
    weights: str,
    predictor: bool,
    throughput: bool,
    progress: Callable[[int, int], None],
) -> LLM:
    """Load a language model from a local path; errors begin with `call`."""
    if is_run(path):
        if weights not in ("decoded", "quantized"):
            raise ValueError(f"{call}: weights={weights!r}: weights must be 'decoded' or 'quantized'.")
        if dtype is not None or predictor:
            raise ValueError(
                f"{call}: a run's model has the dtypes of its recipe and the weights of its checkpoint; "
                "leave out dtype and predictor."
            )
        return _load_run(path, plan, weights, throughput)
    if models.is_encoder(path) or models.is_classifier(path):
        raise ValueError(
            f"{call}: the model is a text encoder or a classifier, which writes no text; take "
            "text.load_encoder or text.load_classifier."
        )
    if plan is not None:  # The model is compared with the plan before its arrays are read.
        parallel.ShardedModel(models.shapes(models.read_config(path)), plan)
    tokenizer, folder = load_tokenizer(path), models.companion_folder(path)
    model = models.load(path, plan=plan, dtype=dtype, weights=weights, predictor=predictor, progress=progress)
    max_length = getattr(models.read_config(path), "max_seq", None)
    prepared = prepare_to_decode(model, plan, throughput=throughput)
    return make_llm(prepared, tokenizer, folder, max_length, special_tokens=True)


def _load_run(path: Path, plan: parallel.Plan | None, weights: str, throughput: bool) -> LLM:
    """Load the model of a run's latest checkpoint.

    Prompts get special tokens only if the run began from a published model.
    """
    recipe, published = read_run_recipe(path), training.RunFolder(path).published
    if plan is not None:
        parallel.ShardedModel(recipe.shapes(), plan)
    tokenizer, model = open_run_tokenizer(path, recipe), restore_run_model(path, recipe, plan)
    if recipe.quantized and weights == "decoded":
        model = decode_run_weights(model, recipe)
        model = model if plan is None else plan.shard(model)
    is_published = published.is_dir()
    prepared = prepare_to_decode(model, plan, throughput=throughput)
    return make_llm(prepared, tokenizer, published, recipe.seq, special_tokens=is_published)


def make_llm(
    model: generation.Model,
    tokenizer: data.ByteTokenizer | data.FileTokenizer,
    folder: Path,
    max_length: int | None,
    *,
    special_tokens: bool,
) -> LLM:
    """Join a model and its tokenizer with the chat template and the special ids of a published folder.

    A folder that does not exist has neither. The first end id is the tokenizer's end of text, which is by default the
    first end id that the model's configs name.
    """
    ends = dict.fromkeys([tokenizer.end_of_text, *models.read_eos_token_ids(folder)])
    begin_id = read_begin_id(folder, tokenizer)
    return LLM(model, tokenizer, read_chat_template(folder), tuple(ends), special_tokens, max_length, begin_id)
