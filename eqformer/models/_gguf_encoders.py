"""Text encoders and T5 in GGUF files: their architectures, and how token vectors are pooled."""

import dataclasses
from collections.abc import Mapping

from .._files import JsonObject
from ._gguf_architectures import Architecture, DENSE
from ._gguf_conversions import read_windows
from ._gguf_file import GGUF
from ._hub import MODULES


# sentence-transformers' names of poolings, by llama.cpp's codes. The code 0 means no pooling, and `_RANK` a classifier.
_MEAN, _RANK = 1, 4
_POOLINGS = {_MEAN: "mean", 2: "cls", 3: "lasttoken"}
_NO_ROTARY = dict.fromkeys(("rope_theta", "head_dim", "num_key_value_heads"))
_BIDIRECTIONAL = {"attention.causal": False}
_NORM_EPS = ("attention.layer_norm_epsilon", "layer_norm_eps")
_BERT_LAYER = {
    **{f"attn_{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_DISTILBERT_LAYER = {
    **{f"attn_{name}": f"attention.{name}_lin" for name in "qkv"},
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}
_TABLES = {
    "token_embd": "word_embeddings",
    "token_types": "token_type_embeddings",
    "position_embd": "position_embeddings",
    "token_embd_norm": "LayerNorm",
}


def _table_names(prefix: str) -> dict[str, str]:
    return {name: f"{prefix}.embeddings.{published}" for name, published in _TABLES.items()}


def _read_token_types(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the number of token types, which is the number of rows of their table."""
    return {"type_vocab_size": file.shape("token_types.weight")[0]}


def _read_distilbert(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the sizes under the names of DistilBERT."""
    if config["layer_norm_eps"] != 1e-12:
        raise ValueError(
            f"{file.call}: bert.{_NORM_EPS[0]}={config['layer_norm_eps']}: it must be 1e-12 in a file without "
            "token_types.weight."
        )
    names = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
    }
    return {
        **_NO_ROTARY,
        **dict.fromkeys((*names.values(), "layer_norm_eps")),
        **{name: config[known] for name, known in names.items()},
    }


def _read_modernbert(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the layers with a window, and the bases of rotary positions of layers with and without a window.

    The first layer of each period has no window.
    """
    windows = read_windows(config | {"sliding_window": config["local_attention"]}, file, 3, is_first_full=True)
    return {
        **windows,
        **dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling")),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": file.values.get("modern-bert.rope.freq_base_swa", config["rope_theta"]),
    }


ENCODERS: Mapping[str, Architecture] = {
    "bert": Architecture(
        "bert",
        _BERT_LAYER,
        implied=lambda config, file: _NO_ROTARY | _read_token_types(config, file),
        expected=_BIDIRECTIONAL,
        edges=_table_names("bert"),
        # The head of RoBERTa's classifiers; its dense layer with a tanh is BERT's pooler.
        classifier={"cls": "bert.pooler.dense", "cls.output": "classifier"},
        prefix="bert.encoder.layer.",
        eps=_NORM_EPS,
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        implied=lambda config, file: {"num_key_value_heads": None} | _read_token_types(config, file),
        expected=_BIDIRECTIONAL,
        edges=_table_names("nomic_bert") | {"token_embd_norm": "nomic_bert.emb_ln"},
        prefix="nomic_bert.encoder.layers.",
        eps=_NORM_EPS,
    ),
    "modern-bert": Architecture(
        "modernbert",
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        numbers={"attention.sliding_window": "local_attention", "hidden_activation": "hidden_activation"},
        implied=_read_modernbert,
        expected=_BIDIRECTIONAL,
        # New converters state the epsilon of norms twice.
        unread=("attention.sliding_window_pattern", "rope.freq_base_swa", "attention.layer_norm_rms_epsilon"),
        edges={
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
        },
        classifier={"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"},
        eps=("attention.layer_norm_epsilon", "norm_eps"),
    ),
    "eurobert": Architecture(
        "eurobert", implied=lambda config, file: {"tie_word_embeddings": False}, expected=_BIDIRECTIONAL
    ),
    "gemma-embedding": dataclasses.replace(
        DENSE["gemma3"],
        implied=lambda config, file: (
            DENSE["gemma3"].implied(config, file)
            | {"use_bidirectional_attention": True, "query_pre_attn_scalar": config["head_dim"]}
        ),
        expected=_BIDIRECTIONAL,
    ),
}
DISTILBERT = Architecture(
    "distilbert",
    _DISTILBERT_LAYER,
    implied=_read_distilbert,
    expected=_BIDIRECTIONAL,
    edges=_table_names("distilbert"),
    prefix="distilbert.transformer.layer.",
    eps=_NORM_EPS,
)


_T5_STACKS = {"enc": "encoder.block.", "dec": "decoder.block."}
# T5's sublayers by the beginning of their names in files: the published number of the sublayer, and its name.
_T5_ATTENTION = {
    "enc.attn": ("layer.0", "SelfAttention"),
    "dec.attn": ("layer.0", "SelfAttention"),
    "dec.cross_attn": ("layer.1", "EncDecAttention"),
}
_T5_FEED_FORWARD = {"enc.ffn": "layer.1", "dec.ffn": "layer.2"}
_T5_LAYER = {
    **{
        f"{name}_{part}": f"{number}.{attention}.{part}"
        for name, (number, attention) in _T5_ATTENTION.items()
        for part in "qkvo"
    },
    **{
        f"{name}_rel_b": f"{number}.{attention}.relative_attention_bias"
        for name, (number, attention) in _T5_ATTENTION.items()
    },
    **{f"{name}_norm": f"{number}.layer_norm" for name, (number, _) in _T5_ATTENTION.items()},
    **{f"{name}_norm": f"{number}.layer_norm" for name, number in _T5_FEED_FORWARD.items()},
    **{f"{name}_down": f"{number}.DenseReluDense.wo" for name, number in _T5_FEED_FORWARD.items()},
}


def _t5_maps(names: Mapping[str, str]) -> dict[str, str]:
    """Return T5's names of layers' arrays, with these published names of the maps of feed-forward layers."""
    maps = {
        f"{stack}_{name}": f"{number}.DenseReluDense.{published}"
        for stack, number in _T5_FEED_FORWARD.items()
        for name, published in names.items()
    }
    return {**_T5_LAYER, **maps}


def _read_t5(config: JsonObject, file: GGUF) -> JsonObject:
    """Return T5's attributes.

    In all published models, feed-forward layers with a gate have GELUs, and others have ReLUs, as llama.cpp takes them.
    Without gates, hidden vectors are divided by the root of their channels before the head; llama.cpp leaves this out.
    """
    has_gates = file.has("ffn_gate.weight")
    names = {
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "d_kv": "head_dim",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }
    unknown = ("num_key_value_heads", "rope_theta", "max_position_embeddings")
    return {
        **{name: config[known] for name, known in names.items()},
        **dict.fromkeys((*names.values(), *unknown)),
        "num_decoder_layers": config["num_decoder_layers"] or config["num_hidden_layers"],
        "feed_forward_proj": "gated-gelu" if has_gates else "relu",
        "scale_decoder_outputs": not has_gates,
    }


T5 = Architecture(
    "t5",
    _t5_maps({"up": "wi"}),
    sizes={"attention.relative_buckets_count": "relative_attention_num_buckets"},
    numbers={"decoder_block_count": "num_decoder_layers", "decoder_start_token_id": "decoder_start_token_id"},
    implied=_read_t5,
    unread=("attention.layer_norm_rms_epsilon",),  # repeats the other epsilon
    edges={
        "token_embd": "shared",
        "enc.output_norm": "encoder.final_layer_norm",
        "dec.output_norm": "decoder.final_layer_norm",
    },
    stacks=_T5_STACKS,
    eps=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)
GATED_T5 = dataclasses.replace(T5, layer=_t5_maps({"gate": "wi_0", "up": "wi_1"}))


def states_encoder(file: GGUF) -> bool:
    """Return whether a file holds a text encoder: its architecture is one of `ENCODERS`, or it states a pooling."""
    kind = file.values.get("general.architecture")
    return kind in ENCODERS or bool(file.values.get(f"{kind}.pooling_type"))


def has_classifier(file: GGUF) -> bool:
    """Return whether a file holds a classifier or a reranker of texts."""
    return any(name.startswith("cls.") for name in file.tensors)


def classifier_attributes(file: GGUF, architecture: Architecture) -> JsonObject:
    """Return the attributes of a file's classifier of texts: its class, its pooling and its labels; none without a
    classifier.

    Raises a `ValueError` for an architecture whose classifiers are not supported, and for a file that lacks arrays of
    its classifier. For example, llama.cpp's converter leaves out the pooler of `BertForSequenceClassification`.
    """
    if not has_classifier(file):
        return {}
    stored = {name.rpartition(".")[0] for name in file.tensors if name.startswith("cls.")}
    if stored != architecture.classifier.keys():
        raise ValueError(
            f"{file.call}: the classifier has the arrays {sorted(stored)}, but for a {file.kind} only "
            f"{sorted(architecture.classifier)} are supported."
        )
    labels, count = file.listed(f"{file.kind}.classifier.output_labels"), file.shape("cls.output.weight")[0]
    if labels and len(labels) != count:
        raise ValueError(
            f"{file.call}: {file.kind}.classifier.output_labels has {len(labels)} labels, but cls.output.weight has "
            f"{count} rows."
        )
    labels = labels or [f"LABEL_{number}" for number in range(count)]
    pooling = file.values.get(f"{file.kind}.classifier.pooling_type", _MEAN)
    if pooling not in _POOLINGS:
        raise ValueError(f"{file.call}: {file.kind}.classifier.pooling_type={pooling!r} is not supported.")
    attributes = {"classifier_pooling": _POOLINGS[pooling]} if architecture.model_type == "modernbert" else {}
    return attributes | {
        "architectures": [f"{architecture.model_type}ForSequenceClassification"],
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }


def context_length(file: GGUF) -> int:
    """Return the length to which texts are cut, in tokens."""
    name = f"{file.kind}.context_length"
    length = file.values.get(name)
    if type(length) is not int or length < 1:
        raise ValueError(f"{file.call}: {name}={length!r}: it must be a whole number above 0.")
    return length


def sentence_files(file: GGUF) -> dict[str, object]:
    """Return the contents of sentence-transformers' files, by name; none if the file does not state a pooling.

    GGUF files do not state whether vectors are divided by their length. The contents say that they are, because
    llama.cpp's programs divide them by default. A classifier or reranker has no such files. Raises a `ValueError` for a
    pooling of another kind.
    """
    name = f"{file.kind}.pooling_type"
    pooling = file.values.get(name, 0)
    if pooling == 0 or (pooling == _RANK and has_classifier(file)):
        return {}
    if pooling not in _POOLINGS:
        known = ", ".join(f"{number} ({kind})" for number, kind in _POOLINGS.items())
        raise ValueError(f"{file.call}: {name}={pooling!r} is not supported; supported are {known}.")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    return {MODULES: modules, "1_Pooling/config.json": {"pooling_mode": _POOLINGS[pooling]}}
