"""Forms that arrive slowly, not at all or without end: nothing waits for them, and no more of them is read."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sqlaqueue.web import Dashboard, security
from tests.web.browser.site import serving
from tests.web.conftest import everything
from tests.web.models import Queues

pytestmark = pytest.mark.once


@contextmanager
def posting(root: str, *headers: str, action: str = "requeue") -> Iterator[socket.socket]:
    """Send the head of a POST, and give its connection."""
    host, _, port = root.removeprefix("http://").rstrip("/").partition(":")
    lines = [
        f"POST /queues/email/actions/{action} HTTP/1.1",
        f"Host: {host}:{port}",
        "Sec-Fetch-Site: same-origin",
        "Content-Type: application/x-www-form-urlencoded",
        *headers,
    ]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        yield connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read until the server closes the connection; return the status and the whole response."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:  # it has closed the connection before it had read everything
        pass
    except TimeoutError:
        pytest.fail(f"the connection is open; received: {received!r}")
    return int(received.split(b" ", 2)[1]), received


@pytest.fixture
def root(queues: Queues, sessions: Any) -> Iterator[str]:
    with serving(Dashboard(queues.all, sessions, access=everything)) as (root, _):
        yield root


@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_form_of_which_a_byte_arrives_now_and_then(root: str, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LONGEST_WAIT", 1.0)
    with posting(root, length) as connection:
        # Nothing is sent once the response has begun: the server has closed the connection by then, and would reset it,
        # by which the client may lose what it has not read.
        while not select.select([connection], [], [], 0.1)[0]:
            connection.sendall(b"1\r\na\r\n" if "chunked" in length else b"a")
        status, response = answer(connection)
    assert status == 408
    assert b"connection: close" in response.lower()
    assert b"default-src 'none'" in response


def test_a_form_that_does_not_arrive(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LONGEST_WAIT", 0.5)
    with posting(root, "Content-Length: 10") as connection:
        assert answer(connection)[0] == 408


def test_a_form_that_says_that_it_is_too_large_is_not_read(root: str) -> None:
    with posting(root, f"Content-Length: {security.MOST_BYTES + 1}") as connection:
        status, response = answer(connection)
    assert status == 413
    assert b"connection: close" in response.lower()


def test_a_form_that_turns_out_to_be_too_large_is_not_read_to_the_end(root: str) -> None:
    with posting(root, "Transfer-Encoding: chunked") as connection:
        sent = 0
        chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
        try:
            while sent < 50 * security.MOST_BYTES:
                connection.sendall(chunk)
                sent += len(chunk)
        except OSError:  # the server has closed the connection
            pass
    # What the buffers of the connection hold was sent, but not read.
    assert sent < 50 * security.MOST_BYTES


def test_a_form_that_is_broken_off_is_no_error_of_the_server(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with posting(root, "Content-Length: 1000") as connection:
        connection.sendall(b"key=1")
    with posting(root, "Content-Length: 0", "Connection: close", action="pause") as connection:
        assert answer(connection)[0] == 303
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
