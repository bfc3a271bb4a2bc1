"""Text models of wholes to transformers, where it is installed: by themselves, and back in the whole."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of
from test_multimodal import loaded, RECORDED, write
from test_published import close, FIXTURES, run

from eqformer import models


pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")


sys.path.append(str(FIXTURES))

import unlisted  # noqa: F401


def logits_of(folder, kind, ids):
    """Those of the model that transformers reads there, of which nothing is missing or left over."""
    model, loading = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", RECORDED)
def test_transformers_reads_the_text_by_itself_and_in_the_whole(name, tmp_path):
    write(tmp_path / "whole", name)
    model, ids = loaded(tmp_path / "whole"), ids_of(61)
    want = run(model, jnp.asarray(ids, jnp.int32))
    models.save(model, tmp_path / "back", like=tmp_path / "whole", whole=True)
    whole = transformers.AutoModelForImageTextToText
    first, again = (logits_of(tmp_path / folder, whole, ids) for folder in ("whole", "back"))
    tolerance = max(2e-5, 3 * RECORDED[name]["rounding"])  # theirs in float32 too, beside ours
    assert np.array_equal(first, again) and close(want, first, tolerance)
    attributes = {"pad_token_id": None}  # by default one that the small vocabulary may not have
    models.save(model, tmp_path / "text", like=tmp_path / "whole", attributes=attributes)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")
    assert close(want, logits_of(tmp_path / "text", transformers.AutoModelForCausalLM, ids), tolerance)
