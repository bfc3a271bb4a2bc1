"""Rows about tasks of lm-evaluation-harness: requests a second, beside the harness's own transformers backend."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from benchmarks._tuning import SMOLLM2
from eqformer import data, evaluation, models, text, write_atomic


MODEL = dataclasses.replace(SMOLLM2, layers=6)
DOCUMENTS, CHOICES, NEW = 8, 4, 24
CONTEXT, ANSWER = (100, 200), (8, 24)  # the least and the greatest number of bytes
SHARED = 400  # bytes of examples with which all prompts of a task begin
PEER, BATCH = "the harness's own transformers backend", 8


def tasks(rounds: int) -> Iterator[Row]:
    """Requests a second of tasks, by 6 layers of SmolLM2-135M's shape (float32, bytes), beside the harness's own."""
    if not find_spec("lm_eval"):
        yield Row("tasks", "left out", note='needs lm_eval: pip install "eqformer[eval]"')
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "model")
        models.save(models.build(MODEL, key=jax.random.key(0)), folder, config=MODEL)
        write_atomic(folder / "tokenizer.json", data.ByteTokenizer().to_json())
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        write_atomic(folder / "tokenizer_config.json", json.dumps(names))
        backends = {"eqformer": evaluation.harness_model(text.load_llm(folder, throughput=True), batch_size=BATCH)}
        if _peers.are_installed():
            peer = import_module("lm_eval.models.huggingface").HFLM
            backends[PEER] = peer(pretrained=str(folder), device="cpu", batch_size=BATCH)
        yield from _time_backends("choices, log-likelihoods", "loglikelihood", _make_choices(), backends, rounds)
        yield from _time_backends("texts of 24 tokens", "generate_until", _make_prompts(), backends, rounds)
        yield from _time_backends(
            "... after shared examples", "generate_until", _make_prompts(SHARED), backends, rounds
        )


def _time_backends(
    group: str, kind: str, arguments: list[tuple], backends: dict[str, Any], rounds: int
) -> Iterator[Row]:
    """Yield the rates of the backends; raise an error unless all backends give the same answers."""
    make_request = import_module("lm_eval.api.instance").Instance
    requests = [
        make_request(request_type=kind, doc={}, arguments=pair, idx=index) for index, pair in enumerate(arguments)
    ]
    answer: Callable[[Any], Callable[[], Any]] = lambda model: lambda: getattr(model, kind)(requests, disable_tqdm=True)
    contenders = {name: answer(model) for name, model in backends.items()}
    answers = {name: call() for name, call in contenders.items()}
    first = answers["eqformer"]
    for name, responses in answers.items():
        if kind == "loglikelihood":
            sums, first_sums = ([log_prob for log_prob, _ in pairs] for pairs in (responses, first))
            np.testing.assert_allclose(sums, first_sums, atol=1e-2, err_msg=name)
        elif differing := sum(mine != theirs for mine, theirs in zip(first, responses, strict=True)):
            raise ValueError(f"{name}: {differing} of {len(first)} texts differ from eqformer's texts.")
    yield from rate_rows(group, "requests/s", len(requests), seconds_in_turn(contenders, rounds))


def _make_choices() -> list[tuple[str, str]]:
    """Return pairs of a context and an answer; the answers of a document share its context."""
    rng = np.random.default_rng(0)
    contexts = [_random_text(rng, CONTEXT) for _ in range(DOCUMENTS)]
    return [(context, " " + _random_text(rng, ANSWER)) for context in contexts for _ in range(CHOICES)]


def _make_prompts(shared: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Return prompts with the options of generation; each prompt begins with the same `shared` bytes of examples."""
    rng = np.random.default_rng(1)
    options = {"until": ["\n\n"], "max_gen_toks": NEW, "do_sample": False}
    examples = _random_text(np.random.default_rng(2), (shared, shared + 1)) if shared else ""
    return [(examples + _random_text(rng, CONTEXT), dict(options)) for _ in range(DOCUMENTS)]


def _random_text(rng: np.random.Generator, lengths: tuple[int, int]) -> str:
    """Return a text of random letters."""
    return "".join(chr(number) for number in rng.integers(97, 123, rng.integers(*lengths)))
