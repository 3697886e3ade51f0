"""The HTTP endpoint of a worker: ``/live`` and ``/ready`` for probes; and ``/metrics``, of a worker or the exporter.

That of a worker answers from the memory of the process, in threads of its own, and reads no database.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Thread
from typing import Any

from sqlaqueue.cli.shared.errors import InputError, first_line
from sqlaqueue.consumer.context import Health
from sqlaqueue.log import fields, logger
from sqlaqueue.telemetry.health_app import health_response
from sqlaqueue.texts import printable

METRICS = "/metrics"
NO_METRICS = "these need prometheus_client: pip install 'sqlaqueue[prometheus]'\n"

MOST_CONNECTIONS = 32
"""Each has a thread and a file descriptor, which clients must not take from the workers of the process."""

DEADLINE = 10.0
"""Seconds for a client to send its request, however slowly, and as many to read the answer."""

_LONGEST_QUEUEING = 1.0
"""Seconds for a new connection to wait until another one ends; then it is closed."""

_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|\[::1\]|::1")

ReadMetrics = Callable[[], tuple[str, bytes]]
"""Returns the type of the content and the metrics."""

Answer = tuple[int, str, bytes]
"""The status of an answer, the type of its content, and the content."""


def parse_address(text: str, option: str = "--http ") -> tuple[str, int]:
    """Return host and port of ``--http``; a port alone is on the loopback interface.

    :param option: what the error begins with, before the text.
    :raises InputError: if it is neither.
    """
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) < 65536:  # noqa: PLR2004 - the number of ports
        raise InputError(f"{option}{text}: give a port, or an address and a port such as 0.0.0.0:9188")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextlib.contextmanager
def serving_http(
    address: str | None, healths: Callable[[], Mapping[str, Health]], metrics: ReadMetrics | None
) -> Iterator[None]:
    """Serve the endpoint while the block runs.

    :param address: as in ``--http``; None for no endpoint.
    :param healths: returns the health of each part by name.
    :param metrics: None if prometheus_client is not installed.
    :raises InputError: if the port cannot be used.
    """
    if address is None:
        yield
        return

    def answer(path: str) -> Answer:
        if path != METRICS:
            status, body = health_response(path, healths())
            return status, "application/json", json.dumps(body).encode() + b"\n"
        if metrics is None:
            return 404, "text/plain", NO_METRICS.encode()
        return 200, *metrics()

    try:
        server = _server(parse_address(address), answer)
    except OSError as error:
        raise InputError(f"--http {address}: {first_line(error)}") from error
    with _running(server) as shown:
        logger.info("serving %s/live, /ready and /metrics", shown, extra=fields("http_started", url=shown))
        yield


@contextlib.contextmanager
def serving_metrics(host: str, port: int, metrics: ReadMetrics) -> Iterator[str]:
    """Serve metrics alone while the block runs, and yield the address.

    :raises OSError: if the port cannot be used.
    """

    def answer(path: str) -> Answer:
        if path not in {METRICS, "/"}:
            return 404, "text/plain", b"the metrics are at /metrics\n"
        return 200, *metrics()

    with _running(_server((host, port), answer)) as shown:
        yield f"{shown}{METRICS}"


@contextlib.contextmanager
def _running(server: ThreadingHTTPServer) -> Iterator[str]:
    host, port = server.server_address[:2]
    Thread(target=server.serve_forever, name="sqlaqueue-http", daemon=True).start()
    try:
        yield f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = BoundedSemaphore(MOST_CONNECTIONS)
        self._since: dict[Any, float] = {}
        """The connections whose requests have not arrived, and when they began, the oldest first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            # A probe sends its request at once. Behind slow clients it would wait until it gives up, and the worker,
            # taken for dead, be killed.
            self._end_oldest()
            if not self._free.acquire(timeout=_LONGEST_QUEUEING):
                self.shutdown_request(request)
                return
        try:
            self._since[request] = time.monotonic()
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _end_oldest(self) -> None:
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # their threads end them meanwhile
            oldest = next(iter(self._since))
            self._since.pop(oldest)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def request_arrived(self, request: Any) -> None:
        """Leave the connection to its answer, which may take longer than a client may take for its request."""
        self._since.pop(request, None)

    def _ended(self, request: Any) -> None:
        self._since.pop(request, None)
        self._free.release()

    def service_actions(self) -> None:
        """End the connections that last too long: a timeout of the socket would begin again with each byte."""
        now = time.monotonic()
        for request, since in [*self._since.items()]:
            if now - since > DEADLINE:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        logger.debug("http: a connection failed: %r", error, extra=fields("http_request"))


def _server(address: tuple[str, int], read: Callable[[str], Answer]) -> ThreadingHTTPServer:
    is_loopback = _LOOPBACK.fullmatch(address[0]) is not None

    class Handler(BaseHTTPRequestHandler):
        timeout = DEADLINE
        server_version = "sqlaqueue"
        sys_version = ""

        def do_GET(self) -> None:
            assert isinstance(self.server, _Server)  # noqa: S101 - it makes the handlers
            self.server.request_arrived(self.request)
            host = self.headers.get("Host", "localhost").lower()
            # A page of any site can have its name lead to the loopback interface, and then read what is served there.
            if is_loopback and not _LOOPBACK.fullmatch(re.sub(r":\d+$", "", host)):
                self._send(421, "text/plain", b"ask by the address, or as localhost\n")
                return
            try:
                answer = read(self.path.partition("?")[0])
            except Exception as error:
                logger.warning(
                    "http: %s: %s", type(error).__name__, first_line(error), exc_info=True, extra=fields("http_error")
                )
                answer = 500, "text/plain", b"this failed; the log of the worker has the error\n"
            self._send(*answer)

        do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in http.server
            # A client chooses the request line, which could otherwise forge lines of the log or control a terminal.
            text = printable(format % args)
            logger.debug("http: %s", text, extra=fields("http_request"))

    return _Server(address, Handler)
