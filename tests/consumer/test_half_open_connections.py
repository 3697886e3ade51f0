"""Half-open connections, on which nothing arrives any more: a firewall has dropped their state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer.core import intervals
from sqlaqueue.consumer.notifications import peers
from tests.consumer.bench import Bench, Server, wait_until
from tests.consumer.listening import LATER, await_listening
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.once


class Proxied(Server):
    """A Consumer whose connections go through a proxy."""

    def __init__(self, bench: Bench, proxy: Proxy, driver: str) -> None:
        super().__init__(bench)
        self.url = proxy.url(driver)
        if bench.api == "sync":
            self.engine: Any = sa.create_engine(self.url)
            self.consumer = Consumer(bench.Job, lambda *_: None, sessionmaker(self.engine), poll_interval=LATER)
        else:

            async def work(session: Any, job: Any) -> None:
                """Do nothing."""

            self.engine = create_async_engine(self.url)
            self.consumer = AsyncConsumer(bench.Job, work, async_sessionmaker(self.engine), poll_interval=LATER)

    def run(self) -> None:
        if isinstance(self.consumer, Consumer):
            self.consumer.run()
            self.engine.dispose()
        else:
            asyncio.run(self._run())

    async def _run(self) -> None:
        await self.consumer.run()
        await self.engine.dispose()


@pytest.mark.parametrize(
    ("api", "driver"),
    [
        ("sync", "psycopg"),
        pytest.param("sync", "psycopg2", marks=pytest.mark.thorough),
        pytest.param("async", "psycopg", marks=pytest.mark.thorough),
        ("async", "asyncpg"),
    ],
)
def test_a_half_open_connection_is_replaced(
    supply: Any, api: str, driver: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """A heartbeat that is not received reveals it. Jobs announced meanwhile are found by a poll."""
    monkeypatch.setattr(intervals, "HEARTBEAT", 0.5)
    monkeypatch.setattr(peers, "PROOF_TIMEOUT", 0.3)
    bench: Bench = supply.take("update_status", api)
    with Proxy(bench.database) as proxy, Proxied(bench, proxy, driver).running() as server:
        for round_ in (1, 2):
            await_listening(server)
            assert proxy.make_listeners_half_open() == 1
            bench.enqueue()
            wait_until(lambda done=2 * round_ - 1: bench.states() == {"completed": done})
            # The new connection receives notifications.
            await_listening(server)
            bench.enqueue()
            wait_until(lambda done=2 * round_: bench.states() == {"completed": done})
    assert "notifications do not arrive" not in log.text


@pytest.mark.parametrize("api", ["sync", "async"])
def test_the_system_probes_a_silent_connection(supply: Any, api: str) -> None:
    """Without this a listener on its own would notice a half-open connection only by its own checks."""
    bench: Bench = supply.take("update_status", api)
    with Proxy(bench.database) as proxy, Proxied(bench, proxy, "psycopg").running() as server:
        await_listening(server)
        port = sa.make_url(proxy.url("psycopg")).port
        idle_times = [
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for connection in connections_to(port)
        ]
    assert idle_times.count(30) == 1


def connections_to(port: int | None) -> Iterator[socket.socket]:
    """Return the sockets of this process that are connected to a local port."""
    descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir() if path.is_socket()]
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as connection, contextlib.suppress(OSError):
            if connection.family == socket.AF_INET and connection.getpeername()[1] == port:
                yield connection
