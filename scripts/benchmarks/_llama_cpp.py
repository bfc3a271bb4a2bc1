"""llama.cpp as a contender, if the packages `llama-cpp-python` and `gguf` are installed.

Requests are decoded in one batch, as in llama.cpp's own server: each sequence of one context is a slot, and every call
of `llama_decode` has the newest token of each slot and the prompts of new requests.
"""

import dataclasses
import importlib.util
import os
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Self

import numpy as np

from eqformer.models import LlamaConfig


def is_installed() -> bool:
    """Return whether llama.cpp and the package that writes its files can be imported."""
    return all(importlib.util.find_spec(package) for package in ("llama_cpp", "gguf"))


def write_model(path: Path, config: LlamaConfig, max_length: int) -> None:
    """Write a GGUF file of a model of a config, with random weights in float32 and no tokenizer."""
    gguf = import_module("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    head_dim = config.head_size
    writer.add_context_length(max_length)
    writer.add_embedding_length(config.embed)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.theta)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    layer_shapes = {
        "attn_q": (queries, config.embed),
        "attn_k": (keys, config.embed),
        "attn_v": (keys, config.embed),
        "attn_output": (config.embed, queries),
        "ffn_gate": (config.mlp, config.embed),
        "ffn_up": (config.mlp, config.embed),
        "ffn_down": (config.embed, config.mlp),
    }
    shapes = {f"blk.{layer}.{name}": shape for layer in range(config.layers) for name, shape in layer_shapes.items()}
    shapes["token_embd"] = (config.vocab, config.embed)
    if not config.tied:
        shapes["output"] = (config.vocab, config.embed)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32))
    norms = [f"blk.{layer}.{name}" for layer in range(config.layers) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(config.embed, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclasses.dataclass
class _Slot:
    """A request that is being decoded."""

    number: int
    length: int
    """The number of tokens in the slot's cache."""
    new: list[int]


class Model:
    """A model of llama.cpp with random weights, freed at the end of its `with` block."""

    def __init__(self, config: LlamaConfig, capacity: int):
        llama = self.llama = import_module("llama_cpp")
        # A callback that prints nothing; it must live as long as the library may call it.
        self._silence = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silence, None)
        llama.llama_backend_init()
        self.vocab = config.vocab
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_model(path, config, capacity)
            self.pointer = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.pointer:
            raise RuntimeError("llama.cpp cannot read this model; leave out `engine`, or uninstall llama-cpp-python.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.llama.llama_model_free(self.pointer)


class Context:
    """A context of a model, with slots and llama.cpp's default settings: the caches are in float16.

    The context's threads, caches and batch are freed at the end of its `with` block, which must be inside the `with`
    block of the model.
    """

    def __init__(self, model: Model, *, slots: int, capacity: int, threads: int):
        llama = self._llama = model.llama
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = slots * capacity, slots
        settings.n_batch = settings.n_ctx
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama.llama_init_from_model(model.pointer, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make {slots} slots; leave the benchmark `engine` out.")
        self._batch = llama.llama_batch_init(settings.n_batch, 0, 1)
        self._vocab, self._slots = model.vocab, slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def run(self, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        """Return the greedy continuation of each prompt; `new` has the number of new tokens for each prompt."""
        llama = self._llama
        memory = llama.llama_get_memory(self._context)
        waiting, texts = list(range(len(prompts)))[::-1], [[] for _ in prompts]
        active: dict[int, _Slot] = {}
        while waiting or active:
            self._batch.n_tokens = 0
            for slot in range(self._slots):
                if slot not in active and waiting:
                    number = waiting.pop()
                    llama.llama_memory_seq_rm(memory, slot, -1, -1)
                    active[slot] = _Slot(number, 0, prompts[number])
            last = {slot: self._add(slot, row.length, row.new) for slot, row in active.items()}
            if status := llama.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode failed with status {status}.")
            for slot, index in last.items():
                row = active[slot]
                logits = llama.llama_get_logits_ith(self._context, index)
                token = int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,))))
                texts[row.number].append(token)
                row.length, row.new = row.length + len(row.new), [token]
                if len(texts[row.number]) == new[row.number]:
                    del active[slot]
        return texts

    def _add(self, slot: int, start: int, ids: list[int]) -> int:
        """Add tokens of a slot to the next call; return the index of the last token, whose logits are computed."""
        batch, index = self._batch, self._batch.n_tokens
        for offset, token in enumerate(ids):
            index = batch.n_tokens
            batch.token[index], batch.pos[index] = token, start + offset
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
            batch.logits[index] = offset == len(ids) - 1
            batch.n_tokens += 1
        return index


def fastest_threads(model: Model) -> int:
    """Return the number of threads that decodes a few tokens faster: 1, or the number of all cores.

    All threads spin until the last thread has done its part. On cores that other programs used too, two threads took
    150 times as long as one thread.
    """
    seconds = {}
    for threads in {1, len(os.sched_getaffinity(0))}:
        with Context(model, slots=1, capacity=64, threads=threads) as context:
            context.run([[1]], [1])
            start = time.perf_counter()
            context.run([[1]], [8])
            seconds[threads] = time.perf_counter() - start
    return min(seconds, key=lambda threads: seconds[threads])
