"""The HTTP endpoint of a worker: what clients can do to the process, and what it does when it cannot read metrics."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sqlaqueue.cli import http
from sqlaqueue.consumer.context import Health
from tests.cli.test_health import get
from tests.programs import wait_until

pytestmark = pytest.mark.once

Address = tuple[str, int]


def healths() -> dict[str, Health]:
    return {"email": Health(alive=True, ready=True)}


@contextlib.contextmanager
def served(
    log: pytest.LogCaptureFixture, metrics: Callable[[], tuple[str, bytes]] = lambda: ("text/plain", b"1")
) -> Iterator[Address]:
    log.set_level(logging.DEBUG, "sqlaqueue")
    with http.serving_http("0", healths, metrics):
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.text)
        assert found is not None
        yield "127.0.0.1", int(found[1])


def connections() -> int:
    """Return how many connections have a thread."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_slow_clients_do_not_take_all_file_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    with served(caplog) as address, contextlib.ExitStack() as clients:
        for _ in range(40):
            clients.enter_context(socket.create_connection(address)).sendall(b"GET /live")
        wait_until(lambda: connections() >= http.MOST_CONNECTIONS, lambda: str(connections()))
        assert connections() == http.MOST_CONNECTIONS
    wait_until(lambda: not connections(), lambda: str(connections()))


def test_a_probe_is_answered_beside_many_slow_clients(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "DEADLINE", 600)
    with served(caplog) as address, contextlib.ExitStack() as clients:
        for _ in range(60):
            clients.enter_context(socket.create_connection(address, timeout=20)).sendall(b"GET /live")
        status, _ = get(f"http://{address[0]}:{address[1]}/live")
        assert status == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:9", 200), ("evil.example", 421)]
)
def test_a_name_that_leads_to_the_loopback_interface_is_refused(
    caplog: pytest.LogCaptureFixture, host: str, status: int
) -> None:
    """A page in a browser could read the metrics by such a name."""
    with served(caplog) as address, socket.create_connection(address, timeout=20) as client:
        client.sendall(f"GET /metrics HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.split()[1] == str(status).encode()


def test_the_exporter_has_the_same_limits() -> None:
    with (
        http.serving_metrics("127.0.0.1", 0, lambda: ("text/plain", b"1")) as url,
        contextlib.ExitStack() as clients,
    ):
        host, port = re.findall(r"//([^:]+):(\d+)/metrics", url)[0]
        for _ in range(40):
            clients.enter_context(socket.create_connection((host, int(port)), timeout=20)).sendall(b"GET /metrics")
        assert get(url)[0] == 200
        assert connections() <= http.MOST_CONNECTIONS
        assert get(url.replace("/metrics", "/other"))[0] == 404


def test_a_client_that_sends_byte_by_byte_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "DEADLINE", 0.5)
    with served(caplog) as address, socket.create_connection(address) as client:
        client.settimeout(0.05)
        received: bytes | None = None
        ended_by = time.monotonic() + 60
        while received is None:
            assert time.monotonic() < ended_by
            try:
                client.sendall(b"G")
                received = client.recv(100)
            except TimeoutError:
                continue
            except OSError:
                received = b""
        assert received == b""
        assert get(f"http://{address[0]}:{address[1]}/live")[0] == 200, "others are served"


def test_metrics_that_cannot_be_read_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    def metrics() -> tuple[str, bytes]:
        raise ValueError("a secret of a collector")

    with served(caplog, metrics) as (host, port):
        assert get(f"http://{host}:{port}/metrics") == (500, "this failed; the log of the worker has the error\n")
        assert get(f"http://{host}:{port}/ready")[0] == 200
    assert "ValueError: a secret of a collector" in caplog.text


def test_control_characters_of_a_request_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with served(caplog) as address, socket.create_connection(address) as client:
        client.sendall(b"GET /\x1b[31m\x07 HTTP/1.0\r\n\r\n")
        while client.recv(1000):
            pass
    (record,) = [each for each in caplog.records if getattr(each, "event", None) == "http_request"]
    assert record.getMessage().startswith('http: "GET /\\x1b[31m\\x07 HTTP/1.0" 404')
