"""A TCP proxy for PostgreSQL that can drop or hold a COMMIT, or drop its reply.

It parses as much of the protocol as it needs: message boundaries, the statements of a transaction, and the command tag
of a COMMIT.
"""

import asyncio
import contextlib
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tests.servers import Database

Action = Literal["drop_commit", "drop_reply", "hold_commit"]
TransactionKind = Literal[
    "settle_with_effects", "complete", "settle", "journal_open", "journal_discard", "claim", "extend", "rescue", "other"
]

_UNTYPED_REQUESTS = {80877102, 80877103, 80877104}
"""The codes of CancelRequest, SSLRequest and GSSENCRequest; a startup packet may follow the latter two."""

_KINDS: list[tuple[TransactionKind, re.Pattern[str]]] = [
    ("settle_with_effects", re.compile(r"INSERT INTO effect")),
    ("journal_open", re.compile(r"INSERT INTO sqlaqueue_crash_journal")),
    ("complete", re.compile(r"^WITH sqlaqueue_ended AS\s*\(UPDATE job SET")),
    ("settle", re.compile(r"^UPDATE job SET (?!lease_expires_at)(?!.*expired)", re.DOTALL)),
    ("claim", re.compile(r"LIMIT.*SKIP LOCKED", re.DOTALL)),
    ("extend", re.compile(r"UPDATE job SET lease_expires_at")),
    ("rescue", re.compile(r"expired_job")),
    ("journal_discard", re.compile(r"DELETE FROM sqlaqueue_crash_journal WHERE sqlaqueue_crash_journal.id")),
]
"""A pattern of the statements of each kind; the first that matches a statement of the transaction applies."""


def kind_of(statements: list[str]) -> TransactionKind:
    """Return the kind of a Consumer's transaction from its statements.

    ``settle_with_effects`` commits the writes of a handler with the outcome of its run. ``complete`` commits success
    of several runs without writes, ``settle`` that of one run, and other outcomes such as released. Both mostly commit
    the next claim as well.
    """
    kinds = (kind for kind, pattern in _KINDS if any(map(pattern.search, statements)))
    return next(kinds, "other")


@dataclass(eq=False)
class CommitRule:
    """An action on the next COMMIT of a kind."""

    kind: TransactionKind
    action: Action
    triggered: threading.Event = field(default_factory=threading.Event)
    """Set when the COMMIT or its reply was dropped, or when the COMMIT is held."""
    resume: threading.Event = field(default_factory=threading.Event)
    """The test sets it to forward a COMMIT that is held."""
    used: bool = False


class Proxy:
    """A proxy for one database; a context manager."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rules: list[CommitRule] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.listener_connections: set[_Connection] = set()
        """The connections that have executed LISTEN."""
        self.connections: set[_Connection] = set()
        """All that are open."""
        self.bytes_per_second = float("inf")
        """How fast each connection brings what the server sends."""
        self.answers_new = True
        """Whether a new connection reaches the server; else it is accepted, and nothing follows."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, driver: str) -> str:
        port = self._server.sockets[0].getsockname()[1]
        return f"postgresql+{driver}://postgres@127.0.0.1:{port}/{self._database.name}"

    def make_listeners_half_open(self) -> int:
        """Forward nothing more on the connections of listeners, and do not close them; return their number."""
        connections = [connection for connection in self.listener_connections if not connection.is_half_open]
        for connection in connections:
            connection.is_half_open = True
        return len(connections)

    def go_silent(self, *, answers_new: bool = True) -> int:
        """Forward nothing more on all connections that there are, as after a failover; return their number.

        :param answers_new: whether new connections work.
        """
        self.answers_new = answers_new
        silent = [connection for connection in [*self.connections] if not connection.is_half_open]
        for connection in silent:
            connection.is_half_open = True
        return len(silent)

    def close_silent(self) -> None:
        """Close the connections on which nothing is forwarded, and let new ones work."""
        self.answers_new = True
        for connection in [*self.connections]:
            if connection.is_half_open:
                self._loop.call_soon_threadsafe(connection.close)

    def on_commit(self, kind: TransactionKind, action: Action) -> CommitRule:
        self._rules.append(CommitRule(kind, action))
        return self._rules[-1]

    def use_rule(self, statements: list[str]) -> CommitRule | None:
        """Return the rule for the COMMIT of a transaction, and mark the rule as used; None when there is none."""
        kind = kind_of(statements)
        for rule in self._rules:
            if rule.kind == kind and not rule.used:
                rule.used = True
                return rule
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        path = str(self._database.server.directory / ".s.PGSQL.5432")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            async with _closing(writer), _connect(path) as (server_reader, server_writer):
                connection = _Connection(self, reader, writer, server_reader, server_writer)
                connection.is_half_open = not self.answers_new
                self.connections.add(connection)
                both = [asyncio.create_task(one()) for one in (connection.forward_requests, connection.forward_replies)]
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.listener_connections.discard(connection)
                    self.connections.discard(connection)
                    for one in both:
                        one.cancel()
                    await asyncio.gather(*both, return_exceptions=True)
        self._tasks.discard(task)


@contextlib.asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> Any:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def _connect(path: str) -> Any:
    reader, writer = await asyncio.open_unix_connection(path)
    async with _closing(writer):
        yield reader, writer


class _Connection:
    """A connection of a client and its connection to the server."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._server_reader, self._server_writer = server_reader, server_writer
        self._statements: list[str] = []
        """The statements of the current transaction."""
        self._prepared: dict[bytes, str] = {}
        self._drop_reply: CommitRule | None = None
        """The rule that drops the reply of the server."""
        self.is_half_open = False
        """Nothing is forwarded in either direction, and the connection is not closed."""

    def close(self) -> None:
        self._writer.close()

    async def forward_requests(self) -> None:
        """Forward the messages of the client, and apply the rules to each COMMIT."""
        starting = True
        while starting:
            starting = await self._forward_startup()
        while True:
            header = await self._reader.readexactly(5)
            message = header + await self._reader.readexactly(int.from_bytes(header[1:]) - 4)
            statement = self._statement(message)
            if statement is not None and ends_transaction(statement):
                rule = self._proxy.use_rule(self._statements) if is_commit(statement) else None
                self._statements = []
                if rule is not None and not await self._apply(rule):
                    return
            elif statement is not None:
                self._statements.append(statement)
                if statement.startswith("LISTEN"):
                    self._proxy.listener_connections.add(self)
            if not self.is_half_open:
                self._server_writer.write(message)
                await self._server_writer.drain()

    async def _forward_startup(self) -> bool:
        """Forward a packet without a type, which precedes all messages; return whether another one follows."""
        length = await self._reader.readexactly(4)
        rest = await self._reader.readexactly(int.from_bytes(length) - 4)
        if not self.is_half_open:
            self._server_writer.write(length + rest)
            await self._server_writer.drain()
        return int.from_bytes(rest[:4]) in _UNTYPED_REQUESTS

    def _statement(self, message: bytes) -> str | None:
        """Return the SQL that a message executes; None when it executes none."""
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

    async def _apply(self, rule: CommitRule) -> bool:
        """Apply a rule to a COMMIT; return whether to forward it. It is held until the test sets ``resume``."""
        if rule.action == "drop_reply":
            self._drop_reply = rule
            return True
        rule.triggered.set()
        while rule.action == "hold_commit" and not rule.resume.is_set():
            await asyncio.sleep(0.005)
        return rule.action == "hold_commit"

    async def forward_replies(self) -> None:
        """Forward the messages of the server, and return when a reply that is to be dropped has arrived."""
        dropped = b""
        while data := await self._server_reader.read(65536):
            if self.is_half_open:
                continue
            if self._drop_reply is None:
                self._writer.write(data)
                await self._writer.drain()
                await asyncio.sleep(len(data) / self._proxy.bytes_per_second)
                continue
            dropped += data
            if b"COMMIT\0" in dropped:
                self._drop_reply.triggered.set()
                return


def ends_transaction(statement: str) -> bool:
    return statement.strip().rstrip(";").upper() in {"COMMIT", "ROLLBACK"}


def is_commit(statement: str) -> bool:
    return statement.strip().rstrip(";").upper() == "COMMIT"
