"""The classes of jobs that tests share, and what tests do with their rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.strategies.existing_messages import ExistingMessages

STRATEGIES = ("update_status", "batch_select", "delete_returning")
KEEPING_ROWS = (*STRATEGIES, "existing_messages")
KINDS = (*KEEPING_ROWS, "rows_are_messages")
"""Each strategy, and each way to keep messages: in a table of the library, in one of the program, in the jobs' rows."""


def new_base() -> Any:
    """Return a declarative base with a MetaData of its own."""

    class Base(DeclarativeBase):
        pass

    return Base


TEXT = sa.String().with_variant(sa.String(50), "mariadb")
"""A text that MariaDB can have an index on."""


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes classes of jobs return the one that it has made for the same arguments.

    The statements of a class that another test has used are compiled already, which takes longer than most of these
    tests. A test that changes its class makes one of its own.
    """
    made: dict[str, Any] = {}

    @wraps(make)
    def find(*arguments: Any, **options: Any) -> Any:
        name = repr((arguments, sorted(options.items())))
        # The text of a function says nothing about what it does.
        if " at 0x" in name:
            return make(*arguments, **options)
        if name not in made:
            made[name] = make(*arguments, **options)
        return made[name]

    return find


@shared
def make_job(kind: str = "update_status", attributes: Mapping[str, Any] | None = None, **config: Any) -> Any:
    """Return a class ``Job`` in a MetaData of its own, with ``id``, ``payload`` and ``attributes``.

    :param kind: one of ``KINDS``. With ``existing_messages`` the test adds the messages, or a trigger: see
        :func:`add_messages`.
    :param attributes: more attributes of the class: ``{"amount": mapped_column(sa.Integer)}``. With some of them the
        class is a new one in each call, as they belong to one class.
    :param config: the options of its :class:`~sqlaqueue.QueueConfig`.
    """
    Base = new_base()  # noqa: N806 - it is a class
    if kind == "existing_messages":

        class Message(Base):
            __tablename__ = "message"
            id: Mapped[int] = mapped_column(primary_key=True)
            job_id: Mapped[int]

        config = {"strategy": ExistingMessages(Message, job="job_id"), "columns": {"priority": None}} | config
    elif kind == "rows_are_messages":
        config |= {"strategy": "delete_returning", "rows_are_messages": True}
    else:
        config = {"strategy": kind} | config
    body = {
        "__module__": __name__,
        "__tablename__": "job",
        "__queue__": QueueConfig(**config),
        "id": mapped_column(sa.Integer, primary_key=True),
        "payload": mapped_column(TEXT),
    }
    return type("Job", (QueueMixin, Base), body | dict(attributes or {}))


def add_messages(model: Any) -> None:
    """Let PostgreSQL add a row to ``message`` for each row of a class of the kind ``existing_messages``."""
    add = (
        "CREATE FUNCTION add_message() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO message (job_id) VALUES (NEW.id); RETURN NEW; END'"
    )
    trigger = "CREATE TRIGGER add_message AFTER INSERT ON job FOR EACH ROW EXECUTE FUNCTION add_message()"
    for text in (add, trigger):
        sa.event.listen(model.__table__, "after_create", sa.DDL(text))


def create(engine: sa.Engine, model: Any) -> Any:
    """Create the tables of a class, and return it."""
    model.metadata.create_all(engine)
    return model


def add(sessions: Any, *jobs: Any) -> None:
    """Add instances and commit, by a sessionmaker or on an engine."""
    with Session(sessions) if isinstance(sessions, sa.Engine) else sessions() as session:
        session.add_all(jobs)
        session.commit()


def insert(engine: sa.Engine, model: Any, rows: Iterable[Mapping[str, Any]] | int) -> list[Any]:
    """Add jobs with these values, or so many without any; commit, and return the first columns of their keys."""
    with Session(engine) as session:
        jobs = [model(**values) for values in (({},) * rows if isinstance(rows, int) else rows)]
        session.add_all(jobs)
        session.commit()
        return [sa.inspect(job).identity[0] for job in jobs]


def read(engine: sa.Engine, model: Any, column: str = "status") -> dict[Any, Any]:
    """Return what the rows have committed in a column, by the first column of their keys."""
    table = model.__table__
    key = next(iter(table.primary_key))
    with engine.connect() as connection:
        found = connection.execute(sa.select(key, table.c[column]).order_by(key))
        return {row[0]: row[1] for row in found}


def execute(engine: sa.Engine, statement: Any, **parameters: Any) -> Any:
    """Execute a statement by itself and commit; return the first value, or how many rows were changed."""
    with engine.begin() as connection:
        result = connection.execute(sa.text(statement) if isinstance(statement, str) else statement, parameters)
        return result.scalar() if result.returns_rows else result.rowcount


@contextmanager
def sent_statements(engine: sa.Engine) -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements that a block sends, with their parameters."""
    sent: list[tuple[str, Any]] = []

    def remember(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        sent.append((statement, parameters))

    sa.event.listen(engine, "before_cursor_execute", remember)
    try:
        yield sent
    finally:
        sa.event.remove(engine, "before_cursor_execute", remember)
