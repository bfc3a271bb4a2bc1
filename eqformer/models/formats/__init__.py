"""Formats of quantized weights in published folders and files, one file for each, and their registry."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .._config_types import PublishedConfig
from ._compressed_tensors import compressed_tensors
from ._format import (
    Coded as Coded,
    Format as Format,
    Grouped as Grouped,
    Parts as Parts,
    QuantizedArray as QuantizedArray,
)
from ._ggml import (
    BLOCKS as BLOCKS,
    Blocks as Blocks,
    COLUMNS as COLUMNS,
    ORDER as ORDER,
    PACKAGED as PACKAGED,
    ROWS as ROWS,
)
from ._packed_integers import awq, gptq
from ._scaled_floats import fp8, modelopt, mxfp4


# The functions that read a `quantization_config`, by its `quant_method`.
FORMATS: Mapping[str, Callable[[PublishedConfig], Format]] = MappingProxyType(
    {
        "awq": awq,
        "compressed-tensors": compressed_tensors,
        "fp8": fp8,
        "gptq": gptq,
        "modelopt": modelopt,
        "mxfp4": mxfp4,
    }
)


# The attributes that are not read, by `quant_method`. Some state which modules are quantized, which the names and
# dtypes of arrays show too. Others state how activations and caches are rounded (eqformer does not round activations),
# how codes and scales were computed, or how the program that wrote the folder should load or run the model.
UNREAD: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "awq": frozenset("modules_to_not_convert backend do_fuse exllama_config fuse_max_seq_len".split()),
        "compressed-tensors": frozenset(
            "ignore quantization_status global_compression_ratio kv_cache_scheme version".split()
        ),
        "fp8": frozenset(
            "activation_scheme modules_to_not_convert modules_to_convert ignored_layers dequantize".split()
        ),
        "gptq": frozenset(
            (
                "damp_percent damp_auto_increment static_groups true_sequential sym model_name_or_path "
                "model_file_base_name meta quantizer dataset batch_size block_name_to_quantize cache_block_outputs "
                "disable_exllama exllama_config max_input_length model_seqlen module_name_preceding_first_block "
                "modules_in_block_to_quantize pad_token_id tokenizer use_cuda_fp16 use_exllama backend "
                "is_marlin_format mse act_group_aware"
            ).split()
        ),
        "modelopt": frozenset("exclude_modules ignore kv_cache_quant_algo kv_cache_scheme producer".split()),
        "mxfp4": frozenset("modules_to_not_convert dequantize".split()),
    }
)


def read_format(published: PublishedConfig) -> Format:
    """Return the format that a `quantization_config` names.

    Raises a `ValueError` for an unknown format, and for an attribute that is neither used nor in `UNREAD`.
    """
    if (method := published.text("quant_method")) not in FORMATS:
        published.refuse(f"quant_method={method!r} is not known; the formats are {', '.join(FORMATS)}.")
    form = FORMATS[method](published)
    published.finish_strictly(lambda name, value: name in UNREAD[method])
    return form
