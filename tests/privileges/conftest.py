"""A database with a queue of each strategy, and roles with exactly the privileges of docs/privileges.md."""

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Constant, Consumer, QueueConfig, QueueMixin
from sqlaqueue.queue.config import ROLES
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.servers import Database, Server

PAGE = Path(__file__).parents[2] / "docs" / "privileges.md"
HEADINGS = {
    "update_status": "### `update_status`",
    "batch_select": "### `batch_select`",
    "delete_returning": "### `delete_returning`",
    "own_message": "### `delete_returning` without a status",
}
NAMES = ("owner", "web", "worker", "operator", "reader")


class Base(DeclarativeBase):
    pass


class Job(QueueMixin, Base):
    __abstract__ = True
    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(default="a")


def config(strategy: Any, **options: Any) -> QueueConfig:
    return QueueConfig(strategy=strategy, max_attempts=3, retry=Constant(delay=0), **options)


class Email(Job):
    __tablename__ = "email"
    __queue__ = config("update_status")


class Order(Job):
    __tablename__ = "orders"
    __queue__ = config("delete_returning")


class Entry(Job):
    __tablename__ = "entry"
    __queue__ = config("batch_select")


class Reminder(Job):
    __tablename__ = "reminder"
    __queue__ = config("delete_returning", rows_are_messages=True)


class Note(Base):
    __tablename__ = "note"
    id: Mapped[int] = mapped_column(primary_key=True)
    about: Mapped[int]


class Letter(Job):
    __tablename__ = "letter"
    __queue__ = config(
        ExistingMessages(Note, job="about"),
        columns={role: None for role in ROLES if role not in {"status", "attempts", "last_error", "max_attempts"}},
    )


MODELS: dict[str, Any] = {
    "update_status": Email,
    "batch_select": Entry,
    "delete_returning": Order,
    "own_message": Reminder,
    "existing_messages": Letter,
}
EXISTING = """
GRANT SELECT ON letter TO worker;
GRANT UPDATE (status, attempts, last_error) ON letter TO worker;
GRANT SELECT, UPDATE (created_at), DELETE ON sqlaqueue_control TO worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON sqlaqueue_consumer TO worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON sqlaqueue_crash_journal TO worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON note TO worker;
GRANT USAGE ON SEQUENCE note_id_seq TO worker;
"""


def statements(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def of_page(begins: str) -> list[str]:
    """Return the statements of the first block after a line of the page."""
    text = PAGE.read_text()
    rest = text[re.search(rf"^{re.escape(begins)}$", text, re.MULTILINE).end() :]  # type: ignore[union-attr] # it is there
    block = re.search(r"```sql\n(.*?)```", rest, re.DOTALL)
    assert block is not None
    return statements(block[1])


class Roles:
    """The roles of one test, with unique names, and a queue of one kind."""

    def __init__(self, database: Database, kind: str) -> None:
        self.database, self.kind = database, kind
        self.Job = MODELS[kind]
        self.table = self.Job.__table__
        self.names = {name: f"{name}_{secrets.token_hex(4)}" for name in NAMES}
        self._engines: list[sa.Engine] = []
        for name in self.names.values():
            self.execute(f"CREATE ROLE {name} LOGIN")
        self.execute("GRANT USAGE, CREATE ON SCHEMA public TO owner")
        Base.metadata.create_all(self.engine("owner"))

    def execute(self, *statements: str) -> None:
        """Execute a statement as a superuser; roles have their names of the page."""
        with self.database.connect() as connection:
            for statement in statements:
                connection.execute(self.translated(statement).encode())

    def translated(self, statement: str) -> str:
        for name, real in self.names.items():
            statement = re.sub(rf"\b(TO|FROM|BY|ROLE|OWNER TO) {name}\b", rf"\1 {real}", statement)
        return statement

    def engine(self, name: str, **options: Any) -> sa.Engine:
        url = self.database.url().replace("postgres@", f"{self.names[name]}@")
        engine = sa.create_engine(url, **options)
        self._engines.append(engine)
        return engine

    def consumer(self, model: Any = None, role: str = "worker", **options: Any) -> Consumer[Any]:
        """A Consumer of that role, whose handler does nothing."""
        return Consumer(model or self.Job, lambda session, job: None, sessionmaker(self.engine(role, **options)))

    def grant_web(self) -> list[str]:
        columns = [role for role in ("status", "priority", "run_at", "attempts", "created_at") if role in self.table.c]
        grants = [
            f"GRANT INSERT (tenant) ON {self.table.name} TO web",
            f"GRANT SELECT ({', '.join(['id', *columns])}) ON {self.table.name} TO web",
            f"GRANT USAGE ON SEQUENCE {self.table.name}_id_seq TO web",
        ]
        if self.kind == "existing_messages":
            # The application inserts the messages, so the enqueueing role needs the privilege.
            grants += ["GRANT INSERT, SELECT (id) ON note TO web", "GRANT USAGE ON SEQUENCE note_id_seq TO web"]
        self.execute(*grants)
        return grants

    def grants_of_worker(self) -> list[str]:
        """Return the privileges of a Consumer's role according to the page."""
        heading = HEADINGS.get(self.kind)
        return statements(EXISTING) if heading is None else of_page(heading)

    def close(self) -> None:
        for engine in self._engines:
            engine.dispose()
        everybody = ", ".join(self.names.values())
        with self.database.connect() as connection:
            connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.SQL(everybody)))  # type: ignore[arg-type] # made here
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.SQL(everybody)))  # type: ignore[arg-type] # made here


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def roles(server: Server, kind: str) -> Iterator[Roles]:
    with server.database() as database:
        roles = Roles(database, kind)
        try:
            yield roles
        finally:
            roles.close()


def enqueue(roles: Roles, *, n: int = 1, as_role: str = "web", **values: Any) -> None:
    with Session(roles.engine(as_role)) as session:
        jobs = [roles.Job(**values) for _ in range(n)]
        session.add_all(jobs)
        session.flush()
        if roles.Job is Letter:
            session.add_all(Note(about=job.id) for job in jobs)
        session.commit()


def count(roles: Roles, what: str) -> Any:
    with roles.database.connect() as connection:
        row = connection.execute(f"SELECT count(*) FROM {what}".encode()).fetchone()
        return row[0] if row else None
