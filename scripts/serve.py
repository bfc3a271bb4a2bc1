"""Serve a trained or a published model by the OpenAI protocol: `python scripts/serve.py --model FOLDER --port 8000`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv, gradients=False)

import dataclasses
from collections.abc import Sequence

from support.command import entry
from support.load import apply_blocks, load_model, ModelFlags

from eqformer import generation, serving, text
from eqformer.recipes import Screen


LOOPBACK = ("127.0.0.1", "::1", "localhost")
TEXT_FLAGS = ("slots", "capacity", "prefill_chunk", "stride", "cache_dtype", "blocks", "max_new_tokens")
EMBEDDING_FLAGS = ("batch_size",)


@dataclasses.dataclass(frozen=True)
class Command(ModelFlags):
    """Serve the latest checkpoint of a run, or a published model, to clients of the OpenAI protocol.

    A text encoder serves /v1/embeddings; every other model serves completions and chats.
    """

    host: str = "127.0.0.1"
    """The address to listen on; the default can be reached only from this machine."""
    port: int = 8000
    """The port to listen on; 0 takes a free port."""
    name: str | None = None
    """The model's name in requests; by default the name of its folder."""
    api_key: str | None = None
    """The key that requests must send as Authorization: Bearer KEY; without a key, everybody is served."""
    slots: int = 8
    """Texts that are generated at once; further texts wait."""
    capacity: int = 2048
    """The largest number of tokens of a prompt and its text together."""
    prefill_chunk: int = 256
    """Tokens of a prompt that are read at once; between decode steps, such a chunk is read for each new prompt."""
    stride: int = 8
    """Maximum tokens of a text that are generated before clients see them; 1 streams evenly, more is faster."""
    cache_dtype: str | None = None
    """Dtype of cached keys and values: bfloat16, int8 or fp8; by default the compute dtype."""
    throughput: bool = False
    """Whether to compile longer for faster decoding: on a CPU, layers whose weights exceed its cache are unstacked."""
    blocks: generation.BlockSampler = generation.BlockSampler()
    batch_size: int = 32
    """Texts that a text encoder reads together."""
    max_prompt_tokens: int | None = None
    """Maximum tokens of a prompt or of a text to embed; by default as many as the model can read."""
    max_new_tokens: int = 1024
    """Maximum new tokens of a text, and the default number for a chat."""
    max_texts: int | None = None
    """Maximum texts that one request may ask for; by default 16, for a text encoder 2,048."""
    max_waiting: int | None = None
    """Maximum texts that wait; further texts are refused; by default 64, for a text encoder 4,096."""
    max_seconds: float = 300.0
    """Longest time from a request to its response, in seconds."""
    max_body_bytes: int = 1 << 22
    """The largest body of a request, in bytes."""


def make_service(command: Command) -> serving.TextService | serving.EmbeddingService:
    """Load the model, and return the service that answers its requests."""
    model = load_model(command, text.load, throughput=command.throughput)
    if isinstance(model, text.TextClassifier):
        raise ValueError(
            f"--model {command.source}: a classifier generates no text and no vectors, and cannot be served; in "
            "Python, use the methods score and classify of eqformer.load(FOLDER)."
        )
    if isinstance(model, text.TextEncoder):
        _refuse_flags(command, TEXT_FLAGS, "a text encoder, which generates no text")
        limits = _limits(command, serving.EMBEDDING_LIMITS)
        return serving.EmbeddingService(model, limits=limits, batch_size=command.batch_size)
    _refuse_flags(command, EMBEDDING_FLAGS, "a language model, which has --slots instead")
    return serving.TextService(
        apply_blocks(model, command.blocks),
        limits=_limits(command, serving.Limits()),
        slots=command.slots,
        capacity=command.capacity,
        prefill_chunk=command.prefill_chunk,
        stride=command.stride,
        cache_dtype=command.cache_dtype,
        throughput=command.throughput,
    )


def _limits(command: Command, defaults: serving.Limits) -> serving.Limits:
    """Return the limits that the flags set, with defaults for flags that are None."""
    stated = {"texts": command.max_texts, "waiting": command.max_waiting}
    return dataclasses.replace(
        defaults,
        prompt_tokens=command.max_prompt_tokens,
        new_tokens=command.max_new_tokens,
        seconds=command.max_seconds,
        body_bytes=command.max_body_bytes,
        **{name: number for name, number in stated.items() if number is not None},
    )


def _refuse_flags(command: Command, names: Sequence[str], model: str) -> None:
    """Raise a `ValueError` for a flag that was given although it does not apply to this kind of model."""
    for name in names:
        if (value := getattr(command, name)) != getattr(Command, name):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {value}: {command.source} holds {model}; leave --{flag} out.")


def serve(command: Command) -> None:
    """Serve the model until the process is told to end."""
    screen = Screen(errors=True)
    name = command.name or command.source.absolute().name
    if command.host not in LOOPBACK and command.api_key is None:
        screen.note(f"--host {command.host}: other machines can use the server without a key; --api-key sets a key")
    service = make_service(command)
    serving.serve(
        service, host=command.host, port=command.port, name=name, api_key=command.api_key, progress=screen.note
    )


main = entry(Command, serve)

if __name__ == "__main__":
    main(sys.argv[1:])
