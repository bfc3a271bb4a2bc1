"""Files beside a model's weights: its tokenizer, its chat template, and the settings of a text encoder.

The settings of a text encoder (pooling, dense layers, prompts and lengths) are in sentence-transformers' files.
"""

import dataclasses
import datetime
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .. import data, models, nn
from .._annotation_checks import fits
from .._files import JsonObject, read_json, read_json_list
from ..models import PublishedConfig


TOKENIZER = "tokenizer.json"


def load_tokenizer(source: str | Path, *, end_of_text: str | None = None) -> data.ByteTokenizer | data.FileTokenizer:
    """Load the tokenizer of a published folder or of a GGUF file.

    Without a `tokenizer.json`, a model with 256 ids gets the byte tokenizer, and any other model raises a `ValueError`.

    Args:
        source: The folder, or the file.
        end_of_text: The token that ends a text; None: the first end id that the model's configs name or, if they name
            none, the default of `data.FileTokenizer`.
    """
    folder = models.companion_folder(source)
    file, ends = folder / TOKENIZER, models.read_eos_token_ids(folder)
    if file.exists():
        return data.FileTokenizer(file, end_of_text=next(iter(ends), None) if end_of_text is None else end_of_text)
    call = f"load_tokenizer({str(source)!r})"
    if models.read_config(source).vocab != data.ByteTokenizer.vocab:
        raise ValueError(f"{call}: the folder has no {TOKENIZER}; put the model's tokenizer there.")
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
    """Load the encoder of conversations for training a published chat model.

    Args:
        source: The published folder or the GGUF file, from which the chat template and the end ids are read.
        tokenizer: The tokenizer; None: the source's tokenizer, see `load_tokenizer`.
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


def read_mask_id(
    folder: Path | None, tokenizer: data.ByteTokenizer | data.FileTokenizer, token: str | None = None
) -> int | None:
    """Return the id of a model's mask token; None if neither the model's files nor the tokenizer name one.

    The id is that of `token`, if given. Otherwise it is `mask_token_id` of `config.json`, the `mask_token` that the
    folder names, or a mask token of the tokenizer.

    Args:
        folder: The folder of the published model that is used or was trained; None: the model was never published.
        tokenizer: The tokenizer of the model.
        token: The name of the mask token, as the recipe of a run gives it.
    """
    if token is not None or folder is None:
        return data.find_mask_id(tokenizer, token)
    config = folder / "config.json"
    stated = read_json(config).get("mask_token_id") if config.exists() else None
    if fits(stated, int):
        return stated
    return data.find_mask_id(tokenizer, data.read_special_tokens(folder).get("mask_token"))


def read_chat_template(folder: Path) -> data.ChatTemplate | None:
    """Read a published folder's chat template, if any; warn and return None if the template cannot be read."""
    if not data.has_chat_template(folder):
        return None
    try:
        return data.ChatTemplate(folder, now=datetime.datetime.now)
    except (ImportError, ValueError) as error:
        warnings.warn(f"{error} The model is loaded without a chat template.", stacklevel=3)
        return None


MODULES = "modules.json"
_SETTINGS, _LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
_OLDER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_ACTIVATIONS |= {"Sigmoid": "sigmoid", "Mish": "mish"}
_INPUT, _OUTPUT = "module_input_name", "module_output_name"
# Attributes without an effect on the vectors, by file.
_IGNORED_SETTINGS = ("__version__", "requirements")
_IGNORED_LENGTHS = ("unpad_inputs", "transformer_task", "modality_config", "module_output_name")
_IGNORED_POOLING = ("word_embedding_dimension", "embedding_dimension", *_OLDER_MODES)


class EmbeddingHead(nn.Module):
    """The layers that make the vector of a text from the hidden vectors of its tokens."""

    pooling: nn.Pooling
    layers: tuple[Callable[[Array], Array], ...] = ()
    """Layers after the pooling, in order: `nn.DenseLayer` and `nn.UnitLength`."""

    def __call__(
        self, hidden: Float[Array, "batch seq embed"], tokens: nn.Tokens, skipped: int | Int[Array, ""] = 0
    ) -> Float[Array, "batch features"]:
        """Return the vector of each row, from its tokens after the first `skipped` tokens."""
        x = self.pooling(hidden, tokens, skipped)
        for layer in self.layers:
            x = layer(x)
        return x


@dataclasses.dataclass(frozen=True)
class EncoderFiles:
    """Settings of a text encoder, from the files of its folder."""

    folder: Path
    """The folder with the model and its tokenizer."""
    head: EmbeddingHead
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled too."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts that are put before a text, by name."""
    default_prompt: str | None = None
    """The name of the prompt for texts that are embedded without an explicit prompt; None: no prompt."""
    similarity: str = "cosine"
    """The function by which vectors are compared."""
    max_length: int | None = None
    """Number of tokens to which longer texts are cut; None: the folder states no length."""
    lower_case: bool = False
    """Whether texts are read in lower case."""


def read_encoder_files(path: Path) -> EncoderFiles:
    """Read the files of a text encoder; raise a `ValueError` that names the file of an unsupported setting.

    Without a `modules.json`, the vector of a text is the mean over all of its tokens, as in sentence-transformers.
    """
    if not (path / MODULES).exists():
        return EncoderFiles(path, EmbeddingHead(nn.Pooling(("mean",))))
    modules = [(kind, _module_folder(path, name)) for kind, name in _list_modules(path)]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"{path / MODULES}: the modules are {', '.join(kinds)}; a text encoder begins with Transformer and Pooling."
        )
    (_, model_folder), (_, pooling_folder) = modules[:2]
    pooling, includes_prompt = _read_pooling(pooling_folder)
    head = EmbeddingHead(pooling, tuple(_read_layer(path, kind, folder) for kind, folder in modules[2:]))
    settings = _read_optional(path / _SETTINGS)
    prompts = settings.nested("prompts")
    if not fits(prompts, dict[str, str | None]):
        settings.refuse(f"prompts={prompts!r}: each must be a text.")
    default = settings.read("default_prompt_name", str, None)
    if default is not None and default not in prompts:
        settings.refuse(f"default_prompt_name={default!r}: the prompts are {', '.join(prompts) or 'none'}.")
    similarity = settings.read("similarity_fn_name", str, "cosine")
    settings.expect("model_type", "SentenceTransformer")
    _finish(settings, _IGNORED_SETTINGS)
    _check_transformer(model_folder)
    length, lower_case = read_lengths(model_folder)
    texts = {name: prompt or "" for name, prompt in prompts.items()}
    return EncoderFiles(
        model_folder, head, includes_prompt, texts, default, similarity, max_length=length, lower_case=lower_case
    )


def read_pooling(folder: str | Path) -> str:
    """Return the pooling of a published model that is trained further: a name in `nn.POOLINGS`.

    The pooling is read from the folder's `modules.json`; without this file, encoders take the mean, and decoders the
    last token. Raises a `ValueError` for a folder with several poolings or with dense layers, which training does not
    support.
    """
    path = models.companion_folder(folder)
    if not (path / MODULES).exists():
        return "mean" if models.is_encoder(folder) else "lasttoken"
    modes = read_encoder_files(path).head.pooling.modes
    if len(modes) > 1 or "Dense" in [kind for kind, _ in _list_modules(path)]:
        raise ValueError(f"{path / MODULES}: only a model with one pooling and no dense layers can be trained further.")
    return next(iter(modes))


def encoder_files(
    pooling: str, *, channels: int, max_length: int, similarity: str, published: EncoderFiles | None = None
) -> dict[str, str]:
    """Return the settings files of a text encoder for sentence-transformers, by name; its model's files are left out.

    Args:
        pooling: How the vector of a text is made from the vectors of its tokens: a name in `nn.POOLINGS`.
        channels: Number of channels of a vector.
        max_length: Number of tokens to which longer texts are cut.
        similarity: The function by which vectors are compared.
        published: The files of a published encoder, whose prompts and layers after the pooling are taken over.
    """
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    layers = () if published is None else published.head.layers
    kinds |= {f"{number}_Normalize": "Normalize" for number, _ in enumerate(layers, 2)}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    flags = {flag: mode == pooling for flag, mode in _OLDER_MODES.items()}
    pooling_settings: JsonObject = {"word_embedding_dimension": channels, **flags}
    settings: JsonObject = {}
    if published is not None:
        pooling_settings["include_prompt"] = published.includes_prompt
        settings = {"prompts": dict(published.prompts), "default_prompt_name": published.default_prompt}
    settings["similarity_fn_name"] = similarity
    return {
        MODULES: json.dumps(modules, indent=2),
        "1_Pooling/config.json": json.dumps(pooling_settings, indent=2),
        _SETTINGS: json.dumps(settings, indent=2),
        _LENGTH: json.dumps({"max_seq_length": max_length, "do_lower_case": False}, indent=2),
    }


def read_lengths(folder: Path) -> tuple[int | None, bool]:
    """Return the length to which texts are cut (None if it is not stated), and whether texts are lower-cased."""
    settings = _read_optional(folder / _LENGTH)
    length = settings.read("max_seq_length", int, None)
    if length is not None and length < 1:
        settings.refuse(f"max_seq_length={length}: it must be at least 1.")
    lower_case = settings.flag("do_lower_case", False)
    _finish(settings, _IGNORED_LENGTHS)
    return length, lower_case


def check_truncation_side(folder: Path) -> None:
    """Raise a `ValueError` for a tokenizer that cuts texts at their beginning."""
    _read_optional(folder / "tokenizer_config.json").expect("truncation_side", "right")


def _check_transformer(folder: Path) -> None:
    """Raise a `ValueError` for a text encoder that does not pool the last hidden vectors of plain texts."""
    settings = _read_optional(folder / _LENGTH)
    settings.expect("transformer_task", "feature-extraction")
    settings.expect(_OUTPUT, "token_embeddings")
    modalities = settings.nested("modality_config")
    wanted = {"method": "forward", "method_output_name": "last_hidden_state"}
    if modalities and modalities.get("text") != wanted:
        settings.refuse(f"modality_config={modalities!r}: the entry of 'text' must be {wanted!r}.")


def stated_max_length(folder: Path) -> int | None:
    """Return the length to which transformers' tokenizer cuts texts, limited to the model's positions."""
    tokenizer, config = _read_optional(folder / "tokenizer_config.json"), _read_optional(folder / "config.json")
    stated = [tokenizer.take("model_max_length", None), config.take("max_position_embeddings", None)]
    lengths = [int(length) for length in stated if isinstance(length, int | float) and length >= 1]
    return min(lengths, default=None)


def _list_modules(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module; a class is named without its package."""
    modules = read_json_list(path / MODULES)
    listed = []
    for module in modules:
        kind, name = module.get("type"), module.get("path")
        if not isinstance(kind, str) or not isinstance(name, str):
            raise ValueError(f"{path / MODULES}: a module is {module!r}; each has a type and a path, which are texts.")
        listed.append((kind.rpartition(".")[2], name))
    return listed


def _module_folder(path: Path, name: str) -> Path:
    """Return the folder of a module; raise a `ValueError` for a folder outside of `path`."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{path / MODULES}: path={name!r}: the folder of a module lies within this folder.")
    return path / name


def _read_optional(file: Path) -> PublishedConfig:
    """Return the attributes of a file; none if there is no such file."""
    return PublishedConfig(read_json(file) if file.exists() else {}, str(file), "this version")


def _finish(attributes: PublishedConfig, ignored: tuple[str, ...] = ()) -> None:
    """Raise a `ValueError` for attributes that were not read, because they may change the vectors."""
    attributes.finish_strictly(lambda name, value: name in ignored)


def _read_pooling(folder: Path) -> tuple[nn.Pooling, bool]:
    """Return the pooling of a folder, and whether the tokens of a prompt are pooled too."""
    file = folder / "config.json"
    attributes = PublishedConfig(read_json(file), str(file), "this version")
    modes = attributes.take("pooling_mode", None)
    if modes is None:  # Older files have a flag for each mode.
        modes = [mode for flag, mode in _OLDER_MODES.items() if attributes.flag(flag, False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not fits(modes, list) or not modes or not all(mode in nn.POOLINGS for mode in modes):
        attributes.refuse(f"pooling_mode={modes!r}: it must be one of {', '.join(nn.POOLINGS)}, or a list of these.")
    includes_prompt = attributes.flag("include_prompt", True)
    _finish(attributes, _IGNORED_POOLING)
    return nn.Pooling(tuple(modes)), includes_prompt


def _read_layer(path: Path, kind: str, folder: Path) -> Callable[[Array], Array]:
    """Return a layer after the pooling."""
    if kind not in ("Dense", "Normalize"):
        raise ValueError(
            f"{path / MODULES}: a module {kind!r} is not supported; after Pooling there may be Dense and Normalize."
        )
    file = folder / "config.json"
    has_config = folder != path and file.exists()  # The outermost folder's config.json describes the model.
    attributes = PublishedConfig(read_json(file) if has_config else {}, str(file), "this version")
    attributes.expect(_INPUT, "sentence_embedding", None)
    attributes.expect(_OUTPUT, None, "sentence_embedding")
    layer = nn.UnitLength() if kind == "Normalize" else _read_dense(folder, attributes)
    _finish(attributes)
    return layer


def _read_dense(folder: Path, attributes: PublishedConfig) -> nn.DenseLayer:
    """Return a dense layer of sentence-transformers."""
    inputs, outputs = attributes.count("in_features"), attributes.count("out_features")
    name = attributes.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        attributes.refuse(f"activation_function={name!r}: it must be one of {', '.join(_ACTIVATIONS)} of torch.nn.")
    is_residual = attributes.flag("use_residual", False)
    if is_residual and inputs != outputs:
        attributes.refuse(f"use_residual=true: in_features={inputs} and out_features={outputs} must be equal then.")
    arrays, bias = models.read_arrays(folder), attributes.flag("bias", True)
    expected = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    if (shapes := {name: array.shape for name, array in arrays.items()}) != expected:
        attributes.refuse(f"the layer's arrays must be {expected}, but the folder has {shapes}.")
    key = jax.random.key(0)
    linear = eqx.filter_eval_shape(nn.Linear, "source -> hidden", bias=bias, source=inputs, hidden=outputs, key=key)
    weights = {name: jnp.asarray(np.asarray(array, np.float32)) for name, array in arrays.items()}
    linear = eqx.tree_at(lambda m: m.weight, linear, weights["linear.weight"])
    linear = eqx.tree_at(lambda m: m.bias, linear, weights["linear.bias"]) if bias else linear
    return nn.DenseLayer(linear, nn.ACTIVATIONS[activation], is_residual=is_residual)
