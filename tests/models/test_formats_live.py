"""FP8 folders that transformers quantizes are decoded as transformers decodes them, where torch is installed."""

import json
from typing import Any

import numpy as np
import pytest
from format_folders import is_map, LLAMA, plain, SINGLE
from safetensors.numpy import load_file

from eqformer import models


pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_folders_are_decoded_as_transformers_decodes_them(scale_fmt, tmp_path):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from safetensors.torch import save_file

    said, arrays = plain(LLAMA)
    config = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), scale_fmt=scale_fmt)

    class Quantizer:
        quantization_config = config

    quantize, dequantize = fp8.Fp8Quantize(Quantizer()), fp8.Fp8Dequantize(Quantizer())
    stored: dict[str, Any] = {}
    decoded: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        tensor = torch.tensor(array.astype(np.float32)).bfloat16()
        parts = quantize.convert({name: tensor}) if is_map(name) else {name: tensor}
        stored |= {key: part.contiguous() for key, part in parts.items()}
        if len(parts) == 2:
            decoded[name] = dequantize._dequantize_one(*parts.values(), torch.bfloat16).float().numpy()
    assert len(decoded) == 14
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": config.to_dict()}))
    models.save(models.load(tmp_path), tmp_path / "plain", like=tmp_path)
    back = load_file(tmp_path / "plain" / SINGLE)
    assert all(np.array_equal(back[name].astype(np.float32), values) for name, values in decoded.items())
    assert not any(np.array_equal(arrays[name].astype(np.float32), values) for name, values in decoded.items())
