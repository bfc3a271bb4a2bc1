"""Text models of multimodal folders, saved alone or within the whole, load in transformers, if it is installed."""

import json
import sys
from typing import Any

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
    # By default an id that the small vocabulary may not have; Step 3.7 must state one.
    attributes = {"pad_token_id": 1 if name == "step3p7" else None}
    # Transformers reads the arrays of Step 3.7's text by the publishers' names within the whole model alone.
    source: dict[str, Any] = {"like": tmp_path / "whole"}
    source = source if name != "step3p7" else {"config": models.read_config(tmp_path / "whole")}
    models.save(model, tmp_path / "text", **source, attributes=attributes)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")
    assert close(want, logits_of(tmp_path / "text", transformers.AutoModelForCausalLM, ids), tolerance)
