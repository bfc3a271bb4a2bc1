"""Text encoders beside sentence-transformers, where it is installed, with weights that no fixture has."""

import numpy as np
import pytest
from encoder_folders import RECORDED, TEXTS, write_encoder

from eqformer import text


pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


@pytest.mark.parametrize("name", RECORDED)
def test_vectors_of_other_weights(name, tmp_path):
    write_encoder(tmp_path, name, seed="live ")
    theirs, ours = package.SentenceTransformer(str(tmp_path), device="cpu"), text.load_encoder(tmp_path)
    want, got = theirs.encode(TEXTS, prompt_name="query"), ours.embed(TEXTS, prompt_name="query")
    assert np.max(np.abs(got - want)) < 1e-5 and np.max(np.abs(got - want[::-1])) > 0.1
    want, got = theirs.similarity(want, want[:2]).numpy(), ours.similarity(got, got[:2])
    assert np.max(np.abs(got - want)) < 1e-4
