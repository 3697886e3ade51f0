"""A TCP proxy before PostgreSQL that knows a COMMIT when it sees one, and can lose it or its answer.

It understands as much of the protocol as that takes: where messages begin, which statements a transaction consists
of, and the server's word that it has committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tests.servers import Database

Action = Literal["lose before", "lose after", "hold"]
Kind = Literal["settle", "bulk", "ledger", "strike", "claim", "extend", "rescue", "other"]

_WITHOUT_TYPE = {80877102, 80877103, 80877104}
"""Requests for a cancellation, for SSL and for GSS; a startup packet may follow the latter two."""

_KINDS: list[tuple[Kind, re.Pattern[str]]] = [
    ("settle", re.compile(r"INSERT INTO effect")),
    ("ledger", re.compile(r"INSERT INTO sqlaqueue_crash_journal")),
    ("bulk", re.compile(r"^(WITH ended AS \()?UPDATE job SET (?!lease_expires_at)(?!.*expired)", re.DOTALL)),
    ("claim", re.compile(r"LIMIT.*SKIP LOCKED", re.DOTALL)),
    ("extend", re.compile(r"UPDATE job SET lease_expires_at")),
    ("rescue", re.compile(r"expired_job")),
    ("strike", re.compile(r"DELETE FROM sqlaqueue_crash_journal")),
]
"""The first that is found in a transaction says what it is for."""


def kind_of(statements: list[str]) -> Kind:
    """Return what a Consumer's transaction is for.

    ``settle`` commits what a handler did with the end of its run, ``bulk`` the ends of runs that did nothing, mostly
    with the next claim.
    """
    kinds = (kind for kind, pattern in _KINDS if any(map(pattern.search, statements)))
    return next(kinds, "other")


@dataclass(eq=False)
class Rule:
    """What is to be done with a COMMIT of some kind, once."""

    kind: Kind
    action: Action
    met: threading.Event = field(default_factory=threading.Event)
    """It has been done; a COMMIT that is held has arrived."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """Set it to let a COMMIT pass that is held."""
    taken: bool = False


class Proxy:
    """The proxy before one database, for as long as its context lasts."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rules: list[Rule] = []
        self._links: set[asyncio.Task[None]] = set()
        self.listening: set[_Link] = set()
        """The connections by which somebody listens."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._link, "127.0.0.1", 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def url(self, driver: str) -> str:
        """Return what ``create_engine`` takes to go through the proxy."""
        port = self._server.sockets[0].getsockname()[1]
        return f"postgresql+{driver}://postgres@127.0.0.1:{port}/{self._database.name}"

    def cut_listening(self) -> int:
        """Let nothing more pass on the connections that listen, without an end to any; return their number."""
        cut = [link for link in self.listening if not link.silent]
        for link in cut:
            link.silent = True
        return len(cut)

    def once(self, kind: Kind, action: Action) -> Rule:
        """Do something with the next COMMIT of a kind."""
        self._rules.append(Rule(kind, action))
        return self._rules[-1]

    def take(self, statements: list[str]) -> Rule | None:
        """Return the rule for a COMMIT that has just arrived, which is its only one."""
        kind = kind_of(statements)
        for rule in self._rules:
            if rule.kind == kind and not rule.taken:
                rule.taken = True
                return rule
        return None

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        path = str(self._database.server.directory / ".s.PGSQL.5432")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            async with _closing(writer), _opening(path) as (answers, server):
                link = _Link(self, reader, writer, answers, server)
                ways = [asyncio.create_task(way()) for way in (link.ask, link.answer)]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.listening.discard(link)
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        self._links.discard(task)


@contextlib.asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> Any:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def _opening(path: str) -> Any:
    reader, writer = await asyncio.open_unix_connection(path)
    async with _closing(writer):
        yield reader, writer


class _Link:
    """One connection, in both directions."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader, self._writer, self._answers, self._server = reader, writer, answers, server
        self._statements: list[str] = []
        """What the transaction has consisted of so far."""
        self._prepared: dict[bytes, str] = {}
        self._losing: Rule | None = None
        """The server's answer is read, and not passed on."""
        self.silent = False
        """Nothing is passed on any more, in either direction: half of the connection is gone."""

    async def ask(self) -> None:
        """Pass on what the client says, but for the COMMITs for which there is a rule."""
        starting = True
        while starting:
            starting = await self._start()
        while True:
            header = await self._reader.readexactly(5)
            message = header + await self._reader.readexactly(int.from_bytes(header[1:]) - 4)
            statement = self._statement(message)
            if statement is not None and ends_transaction(statement):
                rule = self._proxy.take(self._statements) if is_commit(statement) else None
                self._statements = []
                if rule is not None and not await self._obey(rule):
                    return
            elif statement is not None:
                self._statements.append(statement)
                if statement.startswith("LISTEN"):
                    self._proxy.listening.add(self)
            if not self.silent:
                self._server.write(message)
                await self._server.drain()

    async def _start(self) -> bool:
        """Pass on what comes before the first message; return whether more of it follows."""
        length = await self._reader.readexactly(4)
        rest = await self._reader.readexactly(int.from_bytes(length) - 4)
        self._server.write(length + rest)
        await self._server.drain()
        return int.from_bytes(rest[:4]) in _WITHOUT_TYPE

    def _statement(self, message: bytes) -> str | None:
        """Return the SQL that a message has executed; None when it has nothing executed."""
        kind, body = message[:1], message[5:]
        match kind:
            case b"Q":
                return body.rstrip(b"\0").decode()
            case b"P":
                name, sql, _ = body.split(b"\0", 2)
                self._prepared[name] = sql.decode()
                return self._prepared[name] if ends_transaction(self._prepared[name]) else None
            case b"B":
                sql = self._prepared.get(body.split(b"\0", 2)[1], "")
                return None if ends_transaction(sql) else sql
        return None

    async def _obey(self, rule: Rule) -> bool:
        """Return whether the COMMIT is to be passed on."""
        if rule.action == "lose after":
            self._losing = rule
            return True
        rule.met.set()
        while rule.action == "hold" and not rule.go_on.is_set():
            await asyncio.sleep(0.005)
        return rule.action == "hold"

    async def answer(self) -> None:
        """Pass on what the server says, until it has committed what is to be lost."""
        swallowed = b""
        while data := await self._answers.read(65536):
            if self.silent:
                continue
            if self._losing is None:
                self._writer.write(data)
                await self._writer.drain()
                continue
            swallowed += data
            if b"COMMIT\0" in swallowed:
                self._losing.met.set()
                return


def ends_transaction(statement: str) -> bool:
    """Return whether a statement ends a transaction, well or badly."""
    return statement.strip().rstrip(";").upper() in {"COMMIT", "ROLLBACK"}


def is_commit(statement: str) -> bool:
    """Return whether a statement is to commit."""
    return statement.strip().rstrip(";").upper() == "COMMIT"
