"""`load`: the model of a published folder, a GGUF file or a run, with its tokenizer and chat template."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .. import data, generation, models, nn, parallel, training
from .._files import dataclass_from_json, read_json, read_utf8, UnknownKindError
from ._companions import (
    EmbeddingHead,
    encoder_files,
    EncoderFiles,
    load_tokenizer,
    MODULES,
    read_begin_id,
    read_chat_template,
    read_encoder_files,
    read_mask_id,
)
from ._llm import LLM, prepare_to_decode
from ._text_classifier import load_classifier, reads_token_types, TextClassifier
from ._text_encoder import load_encoder, TextEncoder


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
    model is an encoder for masked tokens; a GGUF file holds a text encoder if it states a pooling. `load_llm`,
    `load_encoder` and `load_classifier` load only one of the three kinds, and raise a `ValueError` for the other kinds.

    Args:
        source: A published folder, one file of GGUF, the folder of a run, or the name of a model of the hub.
        plan: The plan that shards the model over a mesh; None: one device.
        dtype: The dtype of all weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored; `"decoded"` decodes them, and merges a run's
            LoRA into the weights.
        predictor: Whether to load the multi-token predictor of an `LLM`, too.
        throughput: Whether to accept longer compilation of an `LLM`'s programs for faster decoding.
        progress: A function that is called with the number of bytes read so far, and of all bytes.
    """
    call = f"load({str(source)!r})"
    path = _find_source(call, source)
    if is_run(path):
        recipe = read_run_recipe(path)
        if not recipe.trains_encoder and recipe.classifier is None:
            return _load_llm(call, path, plan, dtype, weights, predictor, throughput, progress)
        if dtype is not None or weights != "decoded" or predictor or throughput:
            raise ValueError(
                f"{call}: a run's text encoder or classifier takes no dtype, weights, predictor or throughput."
            )
        return load_run_encoder(path, plan) if recipe.trains_encoder else load_run_classifier(path, plan)
    is_classifier = models.is_classifier(path)
    is_encoder = models.is_encoder(path) or (models.companion_folder(path) / MODULES).exists()
    if not is_classifier and not is_encoder:
        return _load_llm(call, path, plan, dtype, weights, predictor, throughput, progress)
    if predictor or throughput:
        raise ValueError(
            f"{call}: the folder holds a text encoder or a classifier, which writes no text; leave out predictor and "
            "throughput."
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
    for a folder without `tokenizer.json`, and for everything that `models.local_path`, `models.load` or
    `load_run_model` refuse.

    Args:
        source: A published folder, one file of GGUF, the folder of a run (the model of its latest checkpoint), or the
            name of a model of the hub, such as `"HuggingFaceTB/SmolLM2-135M-Instruct"` (see `models.local_path`).
        plan: The plan that shards the model over a mesh; None: one device. Generated texts do not depend on the plan.
        dtype: The dtype of all weights; None: each has its published dtype.
        weights: `"quantized"` keeps quantized weights as they are stored, in less memory; `"decoded"` decodes them, and
            merges a run's LoRA into the weights.
        predictor: Whether to load the multi-token predictor, too, for `generate(draft="mtp")`.
        throughput: Whether to accept longer compilation for faster decoding. On a CPU, layers are unstacked if their
            weights exceed the last-level cache (see `generation.unstack_for_platform`), and a C++ compiler builds the
            kernel for quantized weights, once (see `kernels.build_native`).
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
    mask_id = read_mask_id(folder, tokenizer)
    return make_llm(prepared, tokenizer, folder, max_length, special_tokens=True, mask_id=mask_id)


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
    return make_llm(
        prepared,
        tokenizer,
        published,
        recipe.seq,
        special_tokens=is_published,
        mask_id=read_mask_id(published if is_published else None, tokenizer, recipe.mask_token),
    )


def make_llm(
    model: generation.Model,
    tokenizer: data.ByteTokenizer | data.FileTokenizer,
    folder: Path,
    max_length: int | None,
    *,
    special_tokens: bool,
    mask_id: int | None = None,
) -> LLM:
    """Join a model and its tokenizer with the chat template and the special ids of a published folder.

    If the folder does not exist, the `LLM` has no chat template and no special ids but the tokenizer's. The first of
    the `LLM`'s end ids is the tokenizer's end of text. The other end ids are named in the folder's configs.

    Args:
        model: The model in the form that decodes.
        tokenizer: The tokenizer.
        folder: The published folder.
        max_length: Maximum number of tokens of a text; None: unknown.
        special_tokens: Whether the tokenizer adds special tokens to prompts.
        mask_id: The id of a masked token, which only a model of block diffusion needs; None: unknown.
    """
    ends = dict.fromkeys([tokenizer.end_of_text, *models.read_eos_token_ids(folder)])
    begin_id = read_begin_id(folder, tokenizer)
    template, sampler = read_chat_template(folder), generation.sampler_of(model, mask_id)
    return LLM(model, tokenizer, template, tuple(ends), special_tokens, max_length, begin_id, sampler)


# Folders of runs, as `recipes.train` and scripts/pretrain.py write them.


class RunRecipe(NamedTuple):
    """The parts of a run's recipe that the trained model depends on."""

    model: models.ModelConfig
    precision: nn.Precision
    execution: nn.Execution
    lora: training.Lora
    quantized: Mapping[str, Any]
    """The formats of the weights that stay quantized, by path."""
    tokenizer: Path | None
    """The file that the run was given as its tokenizer."""
    end_of_text: str | None
    published: Path | None
    """The published model that the run began from."""
    seq: int
    """Number of tokens of a row in training."""
    loss: str = "next-token"
    """The loss of the run."""
    mask_token: str | None = None
    """The name of the mask token; None: as `read_mask_id` finds it."""
    pooling: str = "mean"
    """How a text encoder makes the vector of a text."""
    similarity: str = "cosine"
    """The function by which the vectors of a text encoder are compared."""
    labels: tuple[str, ...] = ()
    """The names of a classifier's labels; empty for a run of another loss."""
    label_pooling: str | None = None
    """How a classifier makes the vector of a text; None: as in the family's published classifiers."""

    @property
    def trains_encoder(self) -> bool:
        """Whether the run trains a text encoder."""
        return self.loss in ("contrastive", "mlm")

    @property
    def classifier(self) -> models.Classifier | None:
        """The sizes of the run's classifier; None for a run of another loss."""
        is_classifier = self.loss == "classification"
        return models.Classifier(len(self.labels), pooling=self.label_pooling) if is_classifier else None

    def shapes(self) -> nn.Transformer:
        """Return the shapes of the trained model, whose products are not in fp8, even if they were in training."""
        return nn.without_fp8(eqx.filter_eval_shape(self._build))

    def _build(self) -> nn.Transformer:
        model = models.build(self.model, classifier=self.classifier, key=jax.random.key(0))
        model = nn.with_quantized_formats(model, self.quantized)
        model = nn.without_head(model) if self.loss == "contrastive" else model
        return self.lora.apply(self.precision.apply(self.execution.apply(model)), key=jax.random.key(0))


def is_run(path: str | Path) -> bool:
    """Return whether a path is the folder of a run."""
    return training.RunFolder(path).recipe.is_file()


def load_run_model(path: str | Path, plan: parallel.Plan | None = None) -> nn.Transformer:
    """Load the model of a run's latest checkpoint, on one device or sharded by a plan.

    The model computes no product in fp8, even if training did. The recipe is read as data: no code of the folder runs.
    Raises a `ValueError` for a run without a checkpoint, and for a recipe with classes that this process does not know.
    Before you load a model of your own family, import the code that registers the family.
    """
    return restore_run_model(path, read_run_recipe(path), plan)


def restore_run_model(path: str | Path, recipe: RunRecipe, plan: parallel.Plan | None = None) -> nn.Transformer:
    """Load the model of a run's latest checkpoint, with the run's recipe."""
    with training.RunFolder(path).checkpointer() as checkpointer:
        if checkpointer.latest_step is None:
            raise ValueError(f"load({str(path)!r}): the run has no checkpoint yet; let it train on.")
        return training.restore_model(checkpointer, recipe.shapes(), plan)


def decode_run_weights(model: nn.Transformer, recipe: RunRecipe) -> nn.Transformer:
    """Merge the LoRA of a run's model into the model's weights, and decode the weights that are still quantized."""
    merged = nn.merge_lora(model)
    return nn.cast(nn.dequantize(merged), recipe.precision.parameters) if recipe.quantized else merged


def load_run_tokenizer(path: str | Path) -> data.ByteTokenizer | data.FileTokenizer:
    """Load the tokenizer of a run: the run's own file, its published model's, or else the byte tokenizer."""
    return open_run_tokenizer(path, read_run_recipe(path))


def open_run_tokenizer(path: str | Path, recipe: RunRecipe) -> data.ByteTokenizer | data.FileTokenizer:
    """Load the tokenizer of a run, with the run's recipe."""
    if recipe.tokenizer is not None:
        copy = training.RunFolder(path).tokenizer
        return data.FileTokenizer(copy if copy.exists() else recipe.tokenizer, end_of_text=recipe.end_of_text)
    if recipe.published is None:
        return data.ByteTokenizer()
    copy = training.RunFolder(path).published
    return load_tokenizer(copy if copy.exists() else recipe.published, end_of_text=recipe.end_of_text)


def load_run_encoder(path: str | Path, plan: parallel.Plan | None = None) -> TextEncoder:
    """Load the text encoder of a run's latest checkpoint, for a run with the loss `contrastive` or `mlm`.

    The encoder reads at most `seq` tokens of a text, as the run did. After the loss `contrastive`, prompts and the
    layer that divides vectors by their length are taken from the folder that the run began from. Raises a `ValueError`
    for a run with another loss.
    """
    recipe = read_run_recipe(path)
    if not recipe.trains_encoder:
        raise ValueError(f"load_run_encoder({str(path)!r}): the run's loss, {recipe.loss}, trains no text encoder.")
    model = nn.without_head(nn.merge_lora(restore_run_model(path, recipe, plan)))
    tokenizer, published = open_run_tokenizer(path, recipe), _published_encoder(path, recipe)
    head, options = EmbeddingHead(nn.Pooling((recipe.pooling,))), {}
    if published is not None:
        head = EmbeddingHead(head.pooling, published.head.layers)
        options = {name: getattr(published, name) for name in ("prompts", "default_prompt", "includes_prompt")}
    model = model if plan is None else plan.shard(model)
    options |= {"max_length": recipe.seq, "similarity_name": recipe.similarity, "plan": plan}
    return TextEncoder(model, head, tokenizer, **options)


def _published_encoder(path: str | Path, recipe: RunRecipe) -> EncoderFiles | None:
    """Return the encoder files of the model that a contrastive run began from; None if there are none."""
    folder = training.RunFolder(path).published
    return read_encoder_files(folder) if recipe.loss == "contrastive" and (folder / MODULES).exists() else None


def load_run_classifier(path: str | Path, plan: parallel.Plan | None = None) -> TextClassifier:
    """Load the classifier of a run's latest checkpoint, for a run with the loss `classification`.

    The classifier reads at most `seq` tokens of a text, as the run did. Raises a `ValueError` for another loss.
    """
    recipe, published = read_run_recipe(path), training.RunFolder(path).published
    if recipe.classifier is None:
        raise ValueError(f"load_run_classifier({str(path)!r}): the run's loss is {recipe.loss}, not classification.")
    model, tokenizer = nn.merge_lora(restore_run_model(path, recipe, plan)), open_run_tokenizer(path, recipe)
    model = model if plan is None else plan.shard(model)
    options: dict[str, Any] = {"max_length": recipe.seq, "activation": "identity", "plan": plan}
    return TextClassifier(model, tokenizer, recipe.labels, reads_types=reads_token_types(published), **options)


def export_run(path: str | Path, target: str | Path, *, adapter: bool = False) -> None:
    """Write the model of a run's latest checkpoint as a published folder, with its tokenizer.

    With `adapter`, the low-rank changes of a run with LoRA are written alone, as peft does; otherwise they are merged
    into the weights, and quantized weights are decoded. Raises a `ValueError` as `load_run_model` and `models.save` do.
    """
    recipe, published = read_run_recipe(path), training.RunFolder(path).published
    if recipe.classifier is not None and adapter:
        raise ValueError(f"export_run({str(path)!r}, adapter=True): an adapter has no classifier; export the model.")
    model = restore_run_model(path, recipe)
    if adapter:
        published_name = None if recipe.published is None else str(recipe.published)
        models.save_adapter(model, target, config=recipe.model, base=published_name)
        return
    # `base` is what `models.save` makes config.json from; `attributes` are added to config.json, and `files` beside it.
    base: dict[str, Any] = {"config": recipe.model}
    attributes: dict[str, Any] = {}
    files: dict[str, str] = {}
    open_tokenizer = functools.cache(lambda: open_run_tokenizer(path, recipe))
    if (published / "config.json").exists():
        base = {"like": published}
    elif published.exists():  # The run began from a GGUF file, so the copied files include no config.json.
        attributes = {"eos_token_id": models.read_eos_token_ids(published) or None}
        files = {file.name: read_utf8(file) for file in published.iterdir()}
    else:
        tokenizer = open_tokenizer()
        attributes = {"eos_token_id": tokenizer.end_of_text, "bos_token_id": None, "pad_token_id": None}
        if recipe.loss == "block-diffusion":
            attributes["mask_token_id"] = data.find_mask_id(tokenizer, recipe.mask_token)
        files = data.tokenizer_files(tokenizer, max_length=recipe.seq)
    if recipe.classifier is not None:
        attributes |= _label_attributes(recipe, published, open_tokenizer())
    if recipe.trains_encoder:
        files |= encoder_files(
            recipe.pooling,
            channels=recipe.model.embed,
            max_length=recipe.seq,
            similarity=recipe.similarity,
            published=_published_encoder(path, recipe),
        )
    models.save(decode_run_weights(model, recipe), target, **base, attributes=attributes, files=files)


def _label_attributes(
    recipe: RunRecipe, published: Path, tokenizer: data.ByteTokenizer | data.FileTokenizer
) -> dict[str, Any]:
    """Return the attributes of `config.json` that state the labels of a run's classifier, and its padding."""
    names = dict(enumerate(recipe.labels))
    attributes: dict[str, Any] = {"id2label": {str(number): name for number, name in names.items()}}
    attributes["label2id"] = {name: number for number, name in names.items()}
    attributes["problem_type"] = "single_label_classification"
    # transformers reads several texts at once only if it knows the padding.
    stated = read_json(published / "config.json") if (published / "config.json").exists() else {}
    (row,) = tokenizer.encode_texts(["a"])
    if stated.get("pad_token_id") is None and row.ids[-1] != tokenizer.end_of_text:
        attributes["pad_token_id"] = tokenizer.end_of_text
    return attributes


def read_run_recipe(path: str | Path) -> RunRecipe:
    """Read the recipe of a run."""
    file = training.RunFolder(path).recipe
    recipe: Any = read_json(file).get("recipe")
    try:
        return _parse_recipe(file, recipe)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: this is not a recipe that a run wrote ({type(error).__name__}: {error}).") from error


def _parse_recipe(file: Path, recipe: Mapping[str, Any]) -> RunRecipe:
    contrastive, classification = recipe.get("contrastive") or {}, recipe.get("classification") or {}
    text, read = recipe.get("text") or {}, functools.partial(_read_part, file, recipe)
    config = read("model")
    if not isinstance(config, models.ModelConfig):
        raise TypeError(f"model is {config!r:.100}")
    return RunRecipe(
        model=config,
        precision=read("precision") or nn.Precision(),
        execution=read("execution") or nn.Execution(),
        lora=read("lora") or training.Lora(),
        quantized=read_json(training.RunFolder(file.parent).quantized) if recipe.get("weights") == "quantized" else {},
        tokenizer=Path(text["tokenizer"]) if text.get("tokenizer") else None,
        end_of_text=text.get("end_of_text"),
        published=Path(recipe["published"]) if recipe.get("published") else None,
        seq=recipe["seq"],
        loss=recipe.get("loss") or "next-token",
        mask_token=(recipe.get("masking") or {}).get("token"),
        pooling=contrastive.get("pooling") or "mean",
        similarity=contrastive.get("similarity") or "cosine",
        labels=tuple(classification.get("labels") or ()),
        label_pooling=classification.get("pooling"),
    )


def _read_part(file: Path, recipe: Mapping[str, Any], name: str) -> Any:
    """Return one part of a recipe, None if the recipe lacks it; raise a `ValueError` for an unknown class."""
    kinds = [nn.Precision, nn.Execution, training.Lora, *nn.RotaryScaling.__subclasses__()]
    kinds += [family.config for family in models.FAMILIES.values()]
    try:
        return dataclass_from_json(recipe.get(name), {kind.__name__: kind for kind in kinds}, str(file))
    except UnknownKindError as error:
        raise ValueError(
            f"{file}: the recipe names the class {error.kind}, which eqformer does not define; import your code that "
            "defines the class and registers its family by models.register, and load the run again."
        ) from error
