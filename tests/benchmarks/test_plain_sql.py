"""The SQL of a plain queue: DDL, migration, verbs, and the statements of a Consumer.

A model without options must not pay for features that it does not use. Its SQL is kept in ``plain/``, a file for each
strategy, so that a reviewer sees each change.
"""

import io
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue as sq
import sqlaqueue.alembic
from tests import servers
from tests.benchmarks.test_costs import without_haste
from tests.servers import Database

pytestmark = pytest.mark.once

DIRECTORY = Path(__file__).with_name("plain")
STRATEGIES = ("update_status", "delete_returning", "batch_select")
SECTIONS = ("create_all", "migration", "verbs", "consumer")
_WAIT = 10.0

ADVICE = "To accept the new SQL, run `python -m tests.benchmarks plain --write`."


def make_model(strategy: str) -> Any:
    """Return a queue class whose config has only a strategy."""

    class Base(DeclarativeBase):
        pass

    class Email(sq.QueueMixin, Base):
        __tablename__ = "email"
        __queue__ = sq.QueueConfig(strategy=strategy)

        id: Mapped[int] = mapped_column(primary_key=True)
        to: Mapped[str]

    return Email


def record(strategy: str, database: Database) -> dict[str, list[str]]:
    """Return the SQL of a plain queue by section, without repetitions."""
    model = make_model(strategy)
    engine = sa.create_engine(database.url("psycopg"))
    try:
        migration = _migration(model, engine)
        with _recorded(engine) as created:
            model.metadata.create_all(engine)
        with _recorded(engine) as verbs:
            _use_verbs(model, engine)
        with _recorded(engine) as consumer, without_haste():
            _consume(model, engine)
        # The indexes of a table have no fixed order.
        ddl = sorted(text for text in created if text.startswith(("CREATE", "ALTER", "COMMENT")))
        sections = [ddl, migration, verbs, sorted(consumer)]
        return {name: list(dict.fromkeys(texts)) for name, texts in zip(SECTIONS, sections, strict=True)}
    finally:
        engine.dispose()


@contextmanager
def _recorded(engine: sa.Engine) -> Iterator[list[str]]:
    texts: list[str] = []

    def keep(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        # Which of its locks a listener takes, and when, depends on the time.
        if not re.match(r"SELECT (CASE +WHEN .*pg_try_advisory_lock|pg_catalog\.pg_advisory_unlock)", statement):
            texts.append(_normalized(statement))

    sa.event.listen(engine, "before_cursor_execute", keep)
    try:
        yield texts
    finally:
        sa.event.remove(engine, "before_cursor_execute", keep)


def _normalized(text: str) -> str:
    """Return a statement without the parts that differ between runs."""
    text = re.sub(r"sqlaqueue_[0-9a-f]{12,}", "sqlaqueue_<hash>", text)
    # The number of jobs in a claim depends on the durations of the last ones.
    text = re.sub(r"(LIMIT|least\(1 \+|\(SELECT|generate_series\(1,) \d+\b", r"\1 <n>", text)
    return re.sub(r"[ \t]+\n", "\n", text).strip()


def _migration(model: Any, engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        logging.getLogger("alembic").setLevel(logging.WARNING)
        context = MigrationContext.configure(connection, opts={"target_metadata": model.metadata})
        operations = produce_migrations(context, model.metadata)
        parts = [operations.upgrade_ops, operations.downgrade_ops]
        return [render_python_code(part).strip() for part in parts if part is not None]


def _use_verbs(model: Any, engine: sa.Engine) -> None:
    """Execute each verb once, and roll back."""
    settling = (sq.complete, sq.retry, sq.fail, sq.release, sq.cancel, sq.extend, sq.requeue)
    with Session(engine, expire_on_commit=False) as session:
        for verb in settling:
            session.add(model(to="ada@example.com"))
            session.flush()
            jobs = session.scalars(sq.claim(model, 1)).all()
            session.execute(verb(jobs))
            session.rollback()
        for statement in (sq.rescue(model), sq.purge(model), sq.reconcile(model), sq.cancel(sa.select(model))):
            session.execute(statement)
            session.rollback()


def _consume(model: Any, engine: sa.Engine) -> None:
    """Let a Consumer run jobs with each outcome."""
    with Session(engine) as session:
        session.add_all(model(to=f"{number}@example.com") for number in range(30))
        session.commit()
    done = threading.Semaphore(0)

    def handle(session: Session, email: Any) -> None:
        match email.id % 6:
            case 1:
                session.execute(sa.text("SELECT 1"))
            case 2:
                raise sq.Fail("no such address")
            case 3:
                raise sq.Snooze(3600)
            case 4:
                raise sq.Cancel("not wanted")
            case 5:
                raise sq.Retry(3600)

    consumer: sq.Consumer[Any] = sq.Consumer(model, handle, sessionmaker(engine))
    for event in ("completed", "failed", "released", "cancelled", "retried"):
        consumer.on(event, lambda _: done.release())
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        for _ in range(30):
            assert done.acquire(timeout=_WAIT)
    finally:
        consumer.stop()
        thread.join()


def format_sections(sections: dict[str, list[str]]) -> str:
    """Return the text of a file with these sections."""
    out = io.StringIO()
    for name, texts in sections.items():
        out.write(f"-- == {name} ==\n\n")
        for text in texts:
            out.write(f"{text}\n\n")
    return out.getvalue().rstrip() + "\n"


def read(strategy: str) -> dict[str, str]:
    """Read the sections of the file of a strategy."""
    text = (DIRECTORY / f"{strategy}.sql").read_text()
    parts = re.split(r"^-- == (\w+) ==$", text, flags=re.MULTILINE)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def differences(strategy: str, found: dict[str, list[str]]) -> list[str]:
    """Return the differences from the file of a strategy.

    A Consumer's statements may be missing, as it depends on its duration which maintenance tasks it executes.
    """
    known = read(strategy)
    changed = [name for name in SECTIONS[:-1] if "\n\n".join(found[name]) != known[name]]
    return changed + [text for text in found["consumer"] if text not in known["consumer"]]


def main(*, write: bool) -> int:
    """Record the SQL of each strategy; write the files, or print the differences."""
    logging.getLogger("sqlaqueue").setLevel(logging.CRITICAL)
    (version,) = servers.choose_versions("newest", servers.find_installations())
    changed = []
    with servers.running([version]) as running, running.own(version) as server:
        for strategy in STRATEGIES:
            with server.database() as database:
                found = record(strategy, database)
            if write:
                DIRECTORY.mkdir(exist_ok=True)
                (DIRECTORY / f"{strategy}.sql").write_text(format_sections(found))
            else:
                changed += [f"{strategy}: {text}" for text in differences(strategy, found)]
    print(*changed, sep="\n")
    return 1 if changed else 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sql_of_a_plain_queue_is_unchanged(strategy: str, database: Database) -> None:
    changed = differences(strategy, record(strategy, database))
    assert not changed, "\n".join([*changed, ADVICE])


def test_each_difference_is_found() -> None:
    known = {name: [text] for name, text in read("batch_select").items()}
    assert differences("batch_select", known) == []
    for name in SECTIONS:
        changed = {**known, name: [*known[name], "SELECT 1 AS something_new"]}
        assert differences("batch_select", changed)
