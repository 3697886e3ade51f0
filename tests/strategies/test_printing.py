"""A statement can be printed for any dialect; only its execution on another database is refused."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient_to_detached, mapped_column

from sqlaqueue import (
    QueueConfig,
    QueueMixin,
    cancel,
    claim,
    complete,
    consumers,
    extend,
    fail,
    pause,
    paused,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    resume,
    retry,
)
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.runs import set_run
from sqlaqueue.queue.run import Run

pytestmark = pytest.mark.once

STRATEGIES: dict[str, dict[str, Any]] = {
    "update_status": {"strategy": "update_status"},
    "batch_select": {"strategy": "batch_select"},
    "delete_returning": {"strategy": "delete_returning"},
    "own_message": {"strategy": "delete_returning", "rows_are_messages": True},
}
_postgresql: Any = postgresql.dialect
_sqlite: Any = sqlite.dialect
LITERAL = {"compile_kwargs": {"literal_binds": True}}


def make_model(strategy: str) -> Any:
    class Base(DeclarativeBase):
        pass

    class Email(QueueMixin, Base):
        __tablename__ = "email"
        __queue__ = QueueConfig(**STRATEGIES[strategy])
        id: Mapped[int] = mapped_column(primary_key=True)

    return Email


def held_jobs(model: Any, token: Any) -> list[Any]:
    """Return instances as a claim returns them."""
    jobs = []
    for number in (1, 2):
        job = model(**dict.fromkeys(sa.inspect(model).columns.keys()))
        job.id, job.attempts = number, 1
        make_transient_to_detached(job)
        set_run(job, Run((number,), token, 1, 5))
        jobs.append(job)
    return jobs


def statements() -> Iterator[Any]:
    for strategy in STRATEGIES:
        model = make_model(strategy)
        jobs = held_jobs(model, uuid.UUID(int=7) if strategy == "update_status" else "7")
        for name, statement in {
            "claim": claim(model, 10),
            "claim a select": claim(sa.select(model).where(model.id > 5), 10),
            "complete": complete(jobs),
            "retry": retry(jobs, delay=5, error="it's late"),
            "retry at": retry(jobs, at=datetime.now(UTC)),
            "fail": fail(jobs, error=ValueError("no")),
            "release": release(jobs, delay=60),
            "extend": extend(jobs),
            "cancel": cancel(model),
            "cancel jobs": cancel(jobs),
            "requeue": requeue(model),
            "rescue": rescue(model),
            "purge": purge(model, older_than=5),
            "reconcile": reconcile(model),
            "pause": pause(model),
            "resume": resume(model),
            "paused": paused(model),
            "consumers": consumers(model),
        }.items():
            yield pytest.param(statement, id=f"{name}-{strategy}")


@pytest.mark.parametrize("statement", [*statements()])
def test_a_statement_is_printed(statement: Any) -> None:
    for text in (str(statement), str(statement.compile()), str(statement.compile(dialect=_postgresql()))):
        assert "email" in text or "sqlaqueue_" in text
    literal = str(statement.compile(dialect=_postgresql(paramstyle="named"), **LITERAL))
    assert "[POSTCOMPILE" not in literal
    # Of a DELETE with USING, and before 2.1 of JSONB, SQLAlchemy itself says that this database has none.
    with contextlib.suppress(NotImplementedError, sa.exc.UnsupportedCompilationError):
        assert str(statement.compile(dialect=_sqlite()))


def test_values_are_printed_as_they_are_sent() -> None:
    model = make_model("update_status")
    jobs = held_jobs(model, uuid.UUID(int=7))
    text = str(retry(jobs, delay=5, error="it's late").compile(dialect=_postgresql(), **LITERAL))
    for part in ("'1,2'", f"'{uuid.UUID(int=7)}'", "'it''s late'", "make_interval(secs=>5.0)"):
        assert part in text


EXECUTE: dict[str, Callable[[Session, Any], Any]] = {
    "session": lambda session, statement: session.execute(statement),
    "connection": lambda session, statement: session.connection().execute(statement),
    "without a cache": lambda session, statement: session.execute(
        statement, execution_options={"compiled_cache": None}
    ),
}


@pytest.mark.parametrize("how", EXECUTE)
def test_a_printed_statement_is_still_refused_elsewhere(how: str) -> None:
    engine = sa.create_engine("sqlite://")
    statement = claim(make_model("update_status"), 10)
    assert str(statement)
    with Session(engine) as session, pytest.raises(ConfigurationError, match="engine is for sqlite"):
        EXECUTE[how](session, statement)
    engine.dispose()
