"""Serve a trained or a published model by the OpenAI protocol: `python scripts/serve.py --model FOLDER --port 8000`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv, gradients=False)

import dataclasses

from support.command import entry
from support.load import load_llm, ModelFlags

from eqformer import serving
from eqformer.recipes import Screen


LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True)
class Command(ModelFlags):
    """Serve the latest checkpoint of a run, or a published model, to clients of the OpenAI protocol."""

    host: str = "127.0.0.1"
    """The address to listen on; the default is reached from this machine only."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    name: str | None = None
    """The model's name in requests; by default that of its folder."""
    api_key: str | None = None
    """The key that requests must send as Authorization: Bearer KEY; without it, everybody is served."""
    slots: int = 8
    """Texts that are drawn at once; others wait."""
    capacity: int = 2048
    """Tokens of the longest text, with its prompt."""
    prefill_chunk: int = 256
    """Tokens of a prompt that are read at once; between two decoding steps, such a chunk is read for each free slot."""
    stride: int = 8
    """Most tokens of each text that are drawn before clients see them: 1 streams evenly, more is faster."""
    cache_dtype: str | None = None
    """Dtype of cached keys and values: bfloat16, int8 or fp8; as computed by default."""
    most_prompt_tokens: int | None = None
    """Most tokens of a prompt; by default as many as fit into the capacity."""
    most_new_tokens: int = 1024
    """Most tokens of a text, and those of a chat whose client names no number."""
    most_texts: int = 16
    """Most texts that one request may ask for."""
    most_waiting: int = 64
    """Most texts that wait for a slot; further requests are refused."""
    most_seconds: float = 300.0
    """Longest time from a request to its response."""
    most_body_bytes: int = 1 << 22
    """Bytes of the largest body of a request."""


def serve(command: Command) -> None:
    """Serve the model until the process is told to end."""
    screen = Screen(errors=True)
    name = command.name or command.source.absolute().name
    if command.host not in LOOPBACK and command.api_key is None:
        screen.note(f"--host {command.host}: other machines may use the server without a key; --api-key asks for one")
    limits = serving.Limits(
        prompt_tokens=command.most_prompt_tokens,
        new_tokens=command.most_new_tokens,
        texts=command.most_texts,
        waiting=command.most_waiting,
        seconds=command.most_seconds,
        body_bytes=command.most_body_bytes,
    )
    service = serving.TextService(
        load_llm(command),
        limits=limits,
        slots=command.slots,
        capacity=command.capacity,
        prefill_chunk=command.prefill_chunk,
        stride=command.stride,
        cache_dtype=command.cache_dtype,
    )
    serving.serve(
        service, host=command.host, port=command.port, name=name, api_key=command.api_key, progress=screen.note
    )


main = entry(Command, serve)

if __name__ == "__main__":
    main(sys.argv[1:])
