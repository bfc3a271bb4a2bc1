"""Load a server with many clients, which break off a tenth of their requests.

Run `python tests/serving/load_server.py --seconds 600`. The script saves a small model, serves it by
`scripts/serve.py`, and compares every complete text with that of `generate`. It prints figures, and exits with status 1
if a text is lost or differs.
"""

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np

import eqformer
from eqformer import data, models


SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.py"
KINDS = 40  # The number of different requests; `generate` writes their expected texts before the load.


def make_bodies(preset: str) -> tuple[Path, list[dict[str, Any]], list[str]]:
    """Save a model with random weights; return its folder, requests of unlike lengths, and the texts of `generate`."""
    folder = Path(tempfile.mkdtemp()) / "model"
    model = models.build(preset, key=jax.random.key(0))
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=512)
    models.save(model, folder, config=models.preset(preset), files=files)
    llm, rng = eqformer.load(folder), np.random.default_rng(0)
    bodies, texts = [], []
    for number in range(KINDS):
        prompt = "".join(chr(97 + letter) for letter in rng.integers(0, 26, rng.integers(1, 300)))
        body = {"prompt": prompt, "max_tokens": int(rng.integers(1, 150)), "seed": number}
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95}
        bodies.append(body | {"model": "model", "stream": number % 4 < 3})
        options = {name: body[name] for name in ("seed", "temperature", "top_p") if name in body}
        texts.append(llm.generate(prompt, max_new_tokens=body["max_tokens"], **options))
    return folder, bodies, texts


class Load:
    """Clients of one server, with the outcomes of their requests and the seconds that they waited."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], texts: list[str]):
        self.url, self.bodies, self.texts = url, bodies, texts
        self.outcomes: Counter[str] = Counter()
        self.first, self.between = list[float](), list[float]()

    async def run(self, clients: int, seconds: float) -> None:
        """Let each client send one request after another for some seconds."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*[self._ask_until(end, client, number) for number in range(clients)])

    async def _ask_until(self, end: float, client: httpx.AsyncClient, number: int) -> None:
        rng = np.random.default_rng(number)
        while time.monotonic() < end:
            kind, hangs_up = int(rng.integers(len(self.bodies))), rng.random() < 0.1
            try:
                outcome = await self._ask(client, kind, int(rng.integers(1, 8)) if hangs_up else None)
            except httpx.HTTPError as error:
                outcome = f"lost ({type(error).__name__})"
            self.outcomes[outcome] += 1

    async def _ask(self, client: httpx.AsyncClient, kind: int, max_pieces: int | None) -> str:
        """Send a request and return its outcome; break it off after `max_pieces` pieces of text unless that is None."""
        body, start = self.bodies[kind], time.monotonic()
        if not body["stream"]:
            try:
                timeout = 300 if max_pieces is None else 0.05 * max_pieces
                response = await client.post("/v1/completions", json=body, timeout=timeout)
            except httpx.TimeoutException:  # The client has hung up; without `max_pieces` it must not.
                if max_pieces is None:
                    raise
                return "hung up"
            return self._compare(kind, response.status_code, [choice["text"] for choice in response.json()["choices"]])
        pieces, last = list[str](), start
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    (self.between if pieces else self.first).append(now - last)
                    last = now
                    pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                    if len(pieces) == max_pieces:
                        return "hung up"
        return self._compare(kind, response.status_code, pieces)

    def _compare(self, kind: int, status: int, pieces: list[str]) -> str:
        if status != 200:
            return f"status {status}"
        return "equal" if "".join(pieces) == self.texts[kind] else "changed"


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1e3


async def watch(pid: int, seconds: float) -> list[float]:
    """Return 20 measurements of a process's memory in MB, taken over some seconds."""
    sizes = []
    for _ in range(20):
        await asyncio.sleep(seconds / 20)
        sizes.append(resident(pid))
    return sizes


async def measure(load: Load, pid: int, clients: int, seconds: float) -> list[float]:
    """Load the server for some seconds; return its memory in MB over this time."""
    sizes, _ = await asyncio.gather(watch(pid, seconds), load.run(clients, seconds))
    return sizes


def main() -> int:
    """Start the server, load it, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--preset", default="llama-byte-1m")
    parser.add_argument("--slots", type=int, default=16)
    flags = parser.parse_args()
    folder, bodies, texts = make_bodies(flags.preset)
    options = ["--slots", str(flags.slots), "--capacity", "512", "--max-waiting", "200", "--port", "0"]
    command = [sys.executable, str(SCRIPT), "--model", str(folder), *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = next(line for line in server.stderr if line.startswith("serving"))
    load = Load(line.split()[-1], bodies, texts)
    asyncio.run(load.run(flags.clients, 10))  # Memory settles before it is measured.
    load.outcomes, load.first, load.between = Counter(), [], []
    sizes = asyncio.run(measure(load, server.pid, flags.clients, flags.seconds))
    metrics = httpx.get(f"{load.url}/metrics").text
    server.send_signal(signal.SIGTERM)
    status = server.wait(60)
    for name, times in (("first token", load.first), ("between pieces", load.between)):
        middle, late = np.quantile(times, [0.5, 0.95])
        print(f"{name}: p50 {1e3 * middle:,.0f} ms, p95 {1e3 * late:,.0f} ms of {len(times):,}")
    print(f"memory, MB: {' '.join(f'{size:,.0f}' for size in sizes)}; exit status {status}")
    print("\n".join(f"{outcome}: {count:,}" for outcome, count in sorted(load.outcomes.items())))
    print("\n".join(re.findall(r"^eqformer_(?:generated|cancelled|engine|active)\S* \S+$", metrics, re.MULTILINE)))
    return int({*load.outcomes} != {"equal", "hung up"} or status != 0)


if __name__ == "__main__":
    raise SystemExit(main())
