"""The HTTP endpoint of a worker: ``/live``, ``/ready``, ``/metrics``; and the command ``health``."""

from __future__ import annotations

import contextlib
import json
import json as json_module
import os
import re
import socket
import struct
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import BoundedSemaphore, Thread
from typing import Any
from urllib.parse import urlsplit

import click
from sqlalchemy.orm import Session

from sqlaqueue.cli.database import TargetArgument, load_targets, open_targets
from sqlaqueue.cli.output import (
    DURATION,
    FAILED,
    DatabaseError,
    FailedError,
    InputError,
    echo,
    echo_json,
    first_line,
    json_option,
    url_option,
)
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.context import Health
from sqlaqueue.log import fields, logger
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements import verbs
from sqlaqueue.telemetry.asgi import LIVE, READY, health_response
from sqlaqueue.texts import printable

# -- http server -------------------------------------------------------------------------------------------------------
# The HTTP endpoint of a worker: ``/live`` and ``/ready`` for probes; and ``/metrics``, of a worker or the exporter.
#
# That of a worker answers from the memory of the process, in threads of its own, and reads no database.


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
    """Return host and port of ``--http``; a port alone is on the loopback interface."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) >= 65536:  # noqa: PLR2004 - the number of ports
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


# -- health ------------------------------------------------------------------------------------------------------------

_LARGEST_ANSWER = 1_000_000


@click.command(short_help="Check whether a worker is alive and ready, or whether queues have workers.")
@click.argument("checked", cls=TargetArgument, metavar="ADDRESS|TARGET...", nargs=-1, required=True)
@click.option("--live", is_flag=True, help="Ask a worker only whether it is alive: if not, it should be restarted.")
@click.option("--timeout", type=DURATION, default="5s", show_default=True, help="Time for a worker to answer.")
@url_option
@json_option
def health(checked: Sequence[str], url: str | None, timeout: Any, *, live: bool, json: bool) -> None:
    """Check a worker by the address of its endpoint, or queues by their Consumers in the database.

    An ADDRESS is what `sqlaqueue worker --http` was given: a port, a host and a port, or a URL. A worker is ready when
    it claims jobs, and alive as long as it goes on by itself, with or without its database.

    A TARGET is ready if the database has what the queue needs, and a Consumer has sent a heartbeat recently. This needs
    SELECT on sqlaqueue_consumer.

    The exit code is 0 if all are alive or ready, 1 if not, also without a database, and 2 for wrong input.
    """
    rows = [
        _worker(_url_of(each), LIVE if live else READY, timeout.total_seconds())
        if each.startswith(("http://", "https://")) or each.rpartition(":")[2].isdecimal()
        else _queue(each, url, live=live)
        for each in checked
    ]
    results = [row for found in rows for row in found]
    if json:
        echo_json(results)
    else:
        for row in results:
            good = "alive" if live else "ready"
            echo(f"{row['name']}: {good if row['ok'] else f'not {good}: ' + '; '.join(row['problems'])}")
    if not all(row["ok"] for row in results):
        click.get_current_context().exit(FAILED)


def _url_of(text: str) -> str:
    if text.startswith(("http://", "https://")):
        return text.rstrip("/")
    host, port = parse_address(text, "")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _worker(url: str, path: str, timeout: float) -> list[dict[str, Any]]:
    """Ask a worker, and return a row for each of its Consumers, or for each of its processes."""
    name = urlsplit(url).netloc
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=timeout) as answer:  # noqa: S310 - its scheme is http or https
            content = answer.read(_LARGEST_ANSWER)
    except urllib.error.HTTPError as refused:
        content = refused.read(_LARGEST_ANSWER)
        refused.close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        text = first_line(reason) if isinstance(reason, BaseException) else str(reason)
        return [{"name": name, "ok": False, "problems": [f"no worker answers: {text}"]}]
    try:
        queues = json_module.loads(content)["queues"]
        asked = "alive" if path == LIVE else "ready"
        return [
            {"name": f"{name} {queue}", "ok": bool(each[asked]), "problems": [*each["problems"]]}
            for queue, each in queues.items()
        ] or [{"name": name, "ok": path == LIVE, "problems": ["it is starting"]}]
    except (ValueError, LookupError, TypeError, AttributeError):
        return [{"name": name, "ok": False, "problems": [f"{url}{path} is not the endpoint of a worker"]}]


def _queue(text: str, url: str | None, *, live: bool) -> list[dict[str, Any]]:
    if live:
        raise InputError(f"--live: {text} is a queue; give the address of a worker, as in its option --http")
    rows = []
    for target, run in open_targets(load_targets([text]), url):
        number, problems = 0, ["no Consumer is alive"]
        try:
            number = run(_live_consumers, target.spec)
        except (DatabaseError, FailedError) as error:
            problems = [error.message]
        if number:
            problems = []
        rows.append({"name": target.spec.name, "ok": bool(number), "problems": problems, "consumers": number})
    return rows


def _live_consumers(session: Session, model: type[Any], spec: QueueSpec) -> int:
    # Not check_ready(), which needs the privileges of a worker: a probe may only be allowed to read heartbeats.
    connection = session.connection(bind_arguments={"mapper": model})
    checks_of(connection).check_complete(connection, spec)
    return len(session.execute(verbs.consumers(model), bind_arguments={"mapper": model}).all())


# -- worker metrics ----------------------------------------------------------------------------------------------------

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which prometheus_client keeps the metrics of a process in files, for another process to add up."""

_ENDED = 0
"""Stands for the processes that have ended, in the name of a file; no process has this id."""

_reading = threading.Lock()
"""Held while files are read or added up: a value would be counted twice, or not at all."""


def is_available() -> bool:
    return find_spec("prometheus_client") is not None


def instrument_all(consumers: Sequence[ConsumerBase]) -> None:
    """Measure Consumers; those that the application has instrumented itself are left as they are."""
    if is_available():
        from sqlaqueue.prometheus import instrument  # noqa: PLC0415 - optional

        for consumer in consumers:
            instrument(consumer)


def of_this_process() -> ReadMetrics | None:
    if not is_available():
        return None
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - optional

    return lambda: (CONTENT_TYPE_LATEST, generate_latest())


@contextlib.contextmanager
def shared_directory(*, wanted: bool) -> Iterator[str | None]:
    """Make a directory for the metrics of several processes, and remove it after the block.

    A directory that the environment names already is used, and left as it is.
    """
    given = os.environ.get(DIRECTORY)
    if not wanted or not is_available() or given:
        yield given if wanted else None
        return
    with tempfile.TemporaryDirectory(prefix="sqlaqueue-metrics-") as directory:
        yield directory


def of_processes(directory: str | None) -> ReadMetrics | None:
    """Return a function that adds up the metrics in a directory; None without one."""
    if directory is None or not is_available():
        return None
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415 - optional
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415 - optional

    collect: Any = MultiProcessCollector  # it has no types

    def read() -> tuple[str, bytes]:
        registry = CollectorRegistry()
        collect(registry, path=directory)
        with _reading:
            return CONTENT_TYPE_LATEST, generate_latest(registry)

    return read


def forget_process(pid: int, directory: str | None) -> None:
    """Remove the gauges of a process that has ended; its counters stay, added up with those of earlier ones."""
    if directory is not None and is_available():
        from prometheus_client.multiprocess import mark_process_dead  # noqa: PLC0415 - optional

        forget: Any = mark_process_dead  # it has no types
        forget(pid, path=directory)
        if directory != os.environ.get(DIRECTORY):
            # Programs that share a directory read it at any time.
            for kind in ("counter", "histogram", "summary"):
                _add_up(Path(directory, f"{kind}_{pid}.db"), Path(directory, f"{kind}_{_ENDED}.db"))


def _add_up(ended: Path, total: Path) -> None:
    """Add the values of a file to those of another one, and remove it: a process that dies again and again leaves one.

    A file that a killed process has left damaged stays.
    """
    from prometheus_client.mmap_dict import MmapedDict  # noqa: PLC0415 - optional

    values: Any = MmapedDict  # it has no types
    with _reading, contextlib.suppress(FileNotFoundError, RuntimeError, ValueError, struct.error):
        added = [(key, value) for key, value, *_ in values.read_all_values_from_file(str(ended))]
        both = values(str(total))
        try:
            for key, value in added:
                both.write_value(key, both.read_value(key)[0] + value, 0.0)
        finally:
            both.close()
        ended.unlink()
