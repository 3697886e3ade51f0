"""A dashboard of the example's queues, served by uvicorn in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
import uvicorn
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.web import Access, Dashboard
from tests.servers import Database
from tests.web.browser.example import QUEUES, fill


@dataclass
class Site:
    """A dashboard that is served, and its database."""

    root: str
    engine: sa.Engine
    server: uvicorn.Server
    database: Database

    def execute(self, statement: str, **parameters: Any) -> Any:
        """Execute SQL, and return its rows if it has any."""
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return result.all() if result.returns_rows else result.rowcount

    def add(self, *jobs: Any) -> None:
        """Enqueue jobs."""
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve an ASGI application on a free port; give its URL and its server."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=5, **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=asyncio.run, args=[_serve(server, bound)], name="uvicorn")
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started:
                assert thread.is_alive(), "the server has ended"
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/", server
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server does not end"


async def _serve(server: uvicorn.Server, bound: socket.socket) -> None:
    await server.serve(sockets=[bound])
    # A stream that had to be cancelled leaves its connection open, and the loop would end without closing it.
    for connection in [*server.server_state.connections]:
        transport: Any = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()
    await asyncio.sleep(0.1)


@contextlib.contextmanager
def example_site(database: Database, **options: Any) -> Iterator[Site]:
    """Fill a database with the example, and serve its dashboard.

    :param options: arguments of the Dashboard; by default everything is allowed.
    """
    engine = sa.create_engine(database.url(), pool_size=10)
    try:
        with Session(engine) as session:
            fill(session)
        given = {"access": lambda _: Access(read=True, act=True, user="ada"), **options}
        dashboard = Dashboard(QUEUES, sessionmaker(engine), **given)
        with serving(dashboard) as (root, server):
            yield Site(root, engine, server, database)
    finally:
        engine.dispose()
