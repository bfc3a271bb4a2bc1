"""The server of one model: the ASGI app, and the process that serves it until it is told to end."""

import asyncio
import logging
import socket
import types
from collections.abc import Callable
from typing import Any

from .._failures import load_extra
from ._embeddings import EmbeddingService
from ._service import Limits, Service, TextService


_SPARE_FILES = 64
"""Files that the process may open beside its connections."""


def make_app(service: TextService | EmbeddingService, *, name: str = "eqformer", api_key: str | None = None) -> Any:
    """Return an ASGI app that serves a model by the OpenAI protocol, and that other apps can mount.

    The app has the routes `/v1/models`, `/health` and `/metrics`. The app of a language model also has
    `/v1/completions`, `/v1/chat/completions` and a page for chats at `/`; the app of a text encoder has
    `/v1/embeddings`. Raises an `ImportError` without the package `starlette`, which the extra `serve` installs.

    Args:
        service: The service that generates the texts, or embeds them.
        name: The name of the model in requests.
        api_key: The key that requests to `/v1` must send; None: no key is needed.
    """
    load_extra("starlette", extra="serve", call="make_app(service)")
    from ._app import EmbeddingRoutes, TextRoutes

    if isinstance(service, EmbeddingService):
        return EmbeddingRoutes(service, name=name, api_key=api_key).app()
    return TextRoutes(service, name=name, api_key=api_key).app()


def serve(
    service: TextService | EmbeddingService,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "eqformer",
    api_key: str | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> None:
    """Compile the programs of a service, and serve its model until the process gets SIGTERM or SIGINT.

    After the first signal, or after `service.drain()`, the server refuses new requests (503), finishes the admitted
    texts and ends; at a second signal, it ends at once. Raises an `ImportError` without the packages of the extra
    `serve`, and a `ValueError` for an address that cannot be used.

    Args:
        service: The service that generates the texts, or embeds them.
        host: The address that the server listens on; the default can be reached from the same machine only.
        port: The port; 0 takes a free port.
        name: The name of the model in requests.
        api_key: The key that requests to `/v1` must send; None: no key is needed.
        progress: A function that is called with lines that report compiled programs and the server's address.
    """
    uvicorn = load_extra("uvicorn", extra="serve", call="serve(service)")
    app = make_app(service, name=name, api_key=api_key)
    with _listen(host, port) as listener:
        service.compile(progress)
        config = uvicorn.Config(
            app,
            http=_connection_class(service.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=10,
            server_header=False,
        )
        listener.listen(config.backlog)  # Clients may connect as soon as the address is reported.
        address, used_port = listener.getsockname()[:2]
        progress(f"serving {name} at http://{f'[{address}]' if ':' in address else address}:{used_port}")
        asyncio.run(_server_class()(config, service).serve(sockets=[listener]))


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; connections are refused until the caller listens on it."""
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio turns off the delay of small packets (TCP_NODELAY) only for sockets of a stated protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"serve(service, host={host!r}, port={port}): the address cannot be used ({reason}); give another one."
        ) from None
    return listener


def _server_class() -> Any:
    """Return a class of uvicorn's server that finishes the admitted texts before it stops."""
    import uvicorn  # pyright: ignore[reportMissingImports]

    class DrainingServer(uvicorn.Server):
        """Server that refuses new requests after a signal, and ends when no text is active."""

        def __init__(self, config: uvicorn.Config, service: Service):
            super().__init__(config)
            self._service = service

        def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
            """Start to drain at the first signal, and stop at once at the second."""
            if self._service.is_draining:
                self.force_exit = True
                super().handle_exit(sig, frame)
            self._service.drain()

        async def on_tick(self, counter: int) -> bool:
            """Return whether the server ends; uvicorn asks ten times a second."""
            if self._service.is_draining and not self._service.active:
                self.should_exit = True
            return await super().on_tick(counter)

    return DrainingServer


def _connection_class(limits: Limits) -> Any:
    """Return uvicorn's HTTP connection with limits on idle connections.

    A connection must send the head of a request in time. When there are too many connections, the connection that has
    been idle longest is closed.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol  # pyright: ignore[reportMissingImports]

    max_connections = _max_connections(limits.connections)
    # The timer of each idle connection. A connection is added when it becomes idle, so the first has been idle longest.
    idle_timers = dict[Any, asyncio.TimerHandle]()

    class LimitedConnection(H11Protocol):
        """Connection that is closed when it is idle for too long."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                longest_idle = next(iter(idle_timers), self)
                longest_idle.stop_waiting()
                longest_idle.transport.abort()
            if not transport.is_closing():
                self.wait_for_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle is None or self.cycle.response_complete:
                self.wait_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_waiting()
            super().connection_lost(exc)

        def wait_for_request(self) -> None:
            """Close the connection unless the head of a request comes in time."""
            self.stop_waiting()
            idle_timers[self] = self.loop.call_later(limits.idle_seconds, self.transport.abort)

        def stop_waiting(self) -> None:
            """Leave the connection open while it has a request."""
            if (timer := idle_timers.pop(self, None)) is not None:
                timer.cancel()

    return LimitedConnection


def _max_connections(wanted: int) -> int:
    """Return the maximum number of open connections; raise the limit on open files as far as needed."""
    try:
        import resource
    except ImportError:  # Only POSIX systems have this limit.
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError):
            logging.getLogger("eqformer").warning("the limit on open files stays at %d", soft)
    available = wanted if soft == resource.RLIM_INFINITY else soft - _SPARE_FILES
    return max(1, min(wanted, available))
