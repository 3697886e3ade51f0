"""The HTTP endpoint of a worker: ``/live`` and ``/ready`` for probes, ``/metrics`` for Prometheus.

It answers from the memory of the process, in threads of its own, and reads no database.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from sqlaqueue.cli.shared.errors import InputError, first_line
from sqlaqueue.consumer.health import Health
from sqlaqueue.log import fields, logger
from sqlaqueue.telemetry.health_app import health_response

METRICS = "/metrics"
NO_METRICS = "these need prometheus_client: pip install 'sqlaqueue[prometheus]'\n"

_TIMEOUT = 10.0
"""Seconds for a client to send its request."""

ReadMetrics = Callable[[], tuple[str, bytes]]
"""Returns the type of the content and the metrics."""


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
    try:
        server = _server(parse_address(address), healths, metrics)
    except OSError as error:
        raise InputError(f"--http {address}: {first_line(error)}") from error
    host, port = server.server_address[:2]
    shown = f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"
    logger.info("serving %s/live, /ready and /metrics", shown, extra=fields("http_started", url=shown))
    Thread(target=server.serve_forever, name="sqlaqueue-http", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _server(
    address: tuple[str, int], healths: Callable[[], Mapping[str, Health]], metrics: ReadMetrics | None
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT
        server_version = "sqlaqueue"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == METRICS:
                kind, content = ("text/plain", NO_METRICS.encode()) if metrics is None else metrics()
                self._send(404 if metrics is None else 200, kind, content)
                return
            status, body = health_response(path, healths())
            self._send(status, "application/json", json.dumps(body).encode() + b"\n")

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
            logger.debug(f"http: {format}", *args, extra=fields("http_request"))  # noqa: G004 - the format is http.server's own

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    return Server(address, Handler)
