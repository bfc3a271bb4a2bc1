"""The server under load, over real connections: hangups, queues, idle connections, limits, and shutdown."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time

import jax
import pytest
from test_completions_server import SCRIPT, send, SIZES, texts
from text_cases import scripted, small_model

from eqformer import data, generation, kernels, nn, serving
from eqformer.generation import _engine
from eqformer.generation._request_engine import Row
from eqformer.serving import _server
from eqformer.text import LLM


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def llm():
    return scripted(SCRIPT)


@contextlib.contextmanager
def running(llm, **limits):
    """A server in a thread; yields its service and its port."""
    service, lines = serving.TextService(llm, limits=serving.Limits(**limits), **SIZES), list[str]()
    thread = threading.Thread(
        target=serving.serve, args=(service,), kwargs=dict(port=0, name="tiny", progress=lines.append)
    )
    thread.start()
    try:
        wait_for(lambda: lines and lines[-1].startswith("serving tiny at http://127.0.0.1:"), 300)
        yield service, int(lines[-1].rpartition(":")[2])
    finally:
        service.drain()
        thread.join(60)
        assert not thread.is_alive()


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def ask(port, body, method="POST", path="/v1/completions"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    content = json.dumps({"model": "tiny"} | body) if isinstance(body, dict) else body
    connection.request(method, path, content, {"content-type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def slowed(service, monkeypatch, seconds=0.05):
    """Make each step of the engine slower, so that requests can be watched."""
    engine, step = service.engine.engine, service.engine.engine.step

    def slow_step():
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)


def test_a_server_over_connections(llm, monkeypatch):
    with running(llm, body_bytes=1000, body_seconds=0.3, idle_seconds=0.3, waiting=1, connections=40) as (
        service,
        port,
    ):
        body = {"prompt": "ab", "max_tokens": 40, "temperature": 0}
        status, content = ask(port, body)
        assert status == 200 and json.loads(content)["choices"][0]["text"] == SCRIPT[2:42]
        assert ask(port, b"not JSON")[0] == 400 and ask(port, None, "GET", "/health")[0] == 200
        refuses_large_bodies(port)
        refuses_slow_bodies(port)
        closes_idle_connections(port)
        slowed(service, monkeypatch)
        cancels_texts_of_clients_that_hang_up(service, port, body)
        refuses_more_than_fit(service, port, body)
        assert ask(port, body)[0] == 200
        finishes_what_runs(service, port, body)


def refuses_large_bodies(port):
    assert ask(port, {"prompt": "x" * 2000})[0] == 413  # by its announced length, before it is read
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(HEAD + b"content-length: 1000000000000\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # The server closes the connection while it is written to.
            for _ in range(100):
                client.sendall(b"40\r\n" + b"x" * 64 + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def refuses_slow_bodies(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def closes_idle_connections(port):
    """Idle connections, more than the server holds, are closed, and keep nobody waiting."""
    clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(100)]
    for client in clients[::2]:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /health HT")  # the head never ends
    assert ask(port, None, "GET", "/health")[0] == 200
    for client in clients:
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""  # a connection that stays open would raise TimeoutError
        client.close()


def cancels_texts_of_clients_that_hang_up(service, port, body):
    for stream in (False, True):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            content = json.dumps(body | {"model": "tiny", "max_tokens": 180, "stream": stream}).encode()
            client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
            wait_for(lambda: service.active == 1)
        wait_for(lambda: service.active == 0 and service.engine.engine.is_idle)
    # A text that was generated to its end would not count.
    assert "cancelled_requests_total 2\n" in service.metrics.render({})


def refuses_more_than_fit(service, port, body):
    """Two texts are generated and one waits; a fourth is refused."""
    threads = [threading.Thread(target=ask, args=(port, body)) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: service.active == 3)
    status, content = ask(port, body)
    assert status == 429 and json.loads(content)["error"]["code"] == "queue_full"
    for thread in threads:
        thread.join()


def finishes_what_runs(service, port, body):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(port, body | {"max_tokens": 100})))
    thread.start()
    wait_for(lambda: service.active == 1)
    service.drain()
    assert ask(port, body)[0] == 503 and ask(port, None, "GET", "/health")[0] == 503
    thread.join()
    assert answers[0][0] == 200 and json.loads(answers[0][1])["choices"][0]["text"] == SCRIPT[2:102]


def test_a_response_in_time(llm, monkeypatch):
    service = serving.TextService(llm, limits=serving.Limits(seconds=1), **SIZES)
    slowed(service, monkeypatch, 0.4)
    app = serving.make_app(service, name="tiny")
    body = {"prompt": "ab", "max_tokens": 150, "temperature": 0}
    response, streamed = send(app, body, body | {"stream": True})
    assert response.status_code == 408 and "1 s" in response.json()["error"]["message"]
    *_, last = [line for line in streamed.text.split("\n\n") if line]
    assert "1 s" in json.loads(last.removeprefix("data: "))["error"]["message"] and service.active == 0


def test_an_engine_that_fails_is_replaced(llm, monkeypatch):
    service = serving.TextService(llm, **SIZES)
    app, failed = serving.make_app(service, name="tiny"), service.engine

    def fail():
        raise MemoryError("no memory is left")

    monkeypatch.setattr(failed.engine, "step", fail)
    body = {"prompt": "ab", "max_tokens": 10, "temperature": 0}
    first, second = send(app, body, body)
    assert first.status_code == second.status_code == 500 and "MemoryError" in first.json()["error"]["message"]
    (after,) = send(app, body)
    assert texts(after) == [SCRIPT[2:12]] and service.engine is not failed and service.active == 0
    are_deleted = lambda engine: [array.is_deleted() for array in jax.tree.leaves(engine._state)]
    assert all(are_deleted(failed.engine)) and not any(are_deleted(service.engine.engine))
    metrics = service.metrics.render({})
    assert "eqformer_engine_failures_total 1\n" in metrics and "eqformer_cancelled_requests_total 0\n" in metrics


def test_errors_of_a_text_speak_of_the_clients_request(llm, monkeypatch):
    """The engine numbers its requests, and clients do not know these numbers."""
    service = serving.TextService(llm, **SIZES)
    app = serving.make_app(service, name="tiny")
    call, fault = Row.call, lambda *arguments: 1 / 0
    monkeypatch.setattr(Row, "call", lambda row, function, *arguments: call(row, fault, *arguments))
    body = {"prompt": "ab", "max_tokens": 10, "temperature": 0, "stop": "zz", "logit_bias": {"3": 1}}
    send(app, body | {"prompt": "a"})  # The next request is not the engine's request 0.
    response, streamed = send(app, body, body | {"stream": True})
    *_, last = [line for line in streamed.text.split("\n\n") if line]
    for error in (response.json()["error"], json.loads(last.removeprefix("data: "))["error"]):
        assert error["message"] == "a function of the request raised ZeroDivisionError: division by zero"
    assert response.status_code == 500 and service.active == 0


@pytest.mark.parametrize("form, calls", [("int8", 1), (None, 0)])
def test_a_server_builds_the_kernel_for_codes_before_it_compiles(form, calls, monkeypatch):
    lines = list[str]()

    def fail():
        raise RuntimeError("build_native(): no C++ compiler was found")

    monkeypatch.setattr(kernels, "build_native", fail)
    model = small_model() if form is None else nn.quantize(small_model(), form)
    service = serving.TextService(LLM(model, data.ByteTokenizer()), **SIZES)

    def run(requests):
        lines.append("run")
        return []

    monkeypatch.setattr(service.engine.engine, "run", run)
    service.compile(lines.append)
    assert lines.count("build_native(): no C++ compiler was found") == calls
    assert lines[0] == ("run" if form is None else "build_native(): no C++ compiler was found") and "run" in lines


def test_programs_of_all_widths_are_compiled_once(llm, monkeypatch):
    service = serving.TextService(llm, **dict(SIZES, prefill_chunk=192))
    read_chunk, widths = _engine.read_chunk, []

    def count(chunk, cache):
        widths.append(chunk.ids.shape[1])
        return read_chunk(chunk, cache)

    monkeypatch.setattr(_engine, "read_chunk", count)
    service.compile()
    assert widths == [32, 64, 128, 192, 32, 32]  # The last two requests sample, and have a mask.
    widths.clear()
    requests = [generation.Request([7] * length, 1) for length in (1, 32, 33, 64, 65, 128, 129, 191)]
    assert len([*service.engine.engine.run(requests)]) == 8 and {*widths} == {32, 64, 128, 192}


def test_texts_do_not_depend_on_each_other(llm):
    service = serving.TextService(llm, limits=serving.Limits(waiting=40), **SIZES)
    bodies = [{"prompt": "x" * (1 + 3 * n % 40), "max_tokens": 1 + 7 * n % 60, "temperature": 0} for n in range(24)]
    responses = send(serving.make_app(service, name="tiny"), *bodies)
    for body, response in zip(bodies, responses):
        start = len(body["prompt"])
        assert texts(response) == [SCRIPT[start : start + body["max_tokens"]]]


def test_addresses_that_cannot_be_used_are_refused(llm):
    service = serving.TextService(llm, **SIZES)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("no such host", 80), ("127.0.0.1", 70000)):
            with pytest.raises(ValueError, match="the address cannot be used"):
                serving.serve(service, host=host, port=port)


@pytest.mark.parametrize("name", ["prompt_tokens", "new_tokens", "texts", "seconds", "body_bytes", "connections"])
def test_limits_are_numbers_above_zero(name):
    with pytest.raises(ValueError, match=f"Limits\\({name}=0\\)"):
        serving.Limits(**{name: 0})


def test_small_packets_are_sent_at_once():
    """Otherwise the end of each response waits about 40 ms for the client's acknowledgement of its head."""

    async def read_option(listener):
        accepted = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await accepted
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()
            writer.close()
            return option

    assert asyncio.run(read_option(_server._listen("127.0.0.1", 0))) != 0
    assert asyncio.run(read_option(socket.create_server(("127.0.0.1", 0)))) == 0  # a socket without the protocol
