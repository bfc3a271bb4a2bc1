"""How weights are stored in fewer bits: one file a format, and the list of them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .._config import PublishedConfig
from ._awq import awq
from ._compressed import compressed_tensors
from ._format import Coded as Coded, Format as Format, Grouped as Grouped, Numbers as Numbers, Parts as Parts
from ._ggml import BLOCKS as BLOCKS, Blocks as Blocks, ORDER as ORDER, ROWS as ROWS
from ._gptq import gptq
from ._mxfp4 import mxfp4
from ._scaled import fp8


# By `quant_method` what reads a `quantization_config`.
FORMATS: Mapping[str, Callable[[PublishedConfig], Format]] = MappingProxyType(
    {"awq": awq, "compressed-tensors": compressed_tensors, "fp8": fp8, "gptq": gptq, "mxfp4": mxfp4}
)


def read_format(published: PublishedConfig) -> Format:
    """The format that a `quantization_config` names; raises a `ValueError` for one that is not known."""
    if (method := published.text("quant_method")) not in FORMATS:
        published.refuse(f"quant_method={method!r} is not known; the formats are {', '.join(FORMATS)}.")
    found = FORMATS[method](published)
    published.finish()
    return found
