"""The databases of 0.1.0, as dumps: migrated to this version, they run every job, and lose nothing."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Consumer, rescue
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin, doctor
from tests.engines.test_migrations import Project
from tests.programs import wait_until
from tests.shared_database import each_engine as engine
from tests.upgrades.make_dumps import DUMPS, HERE

__all__ = ["engine"]

pytestmark = [
    pytest.mark.once,
    # SQLAlchemy does not reflect such indexes of SQLite; the plug-in reads their texts itself.
    pytest.mark.filterwarnings("ignore:autogenerate skipping|Skipped unsupported reflection"),
]


def load(engine: sa.Engine) -> None:
    """Execute the dump of the kind of database that the engine leads to."""
    name = engine.dialect.name
    text = made_now((DUMPS / f"{name}.sql").read_text())
    connection: Any = engine.raw_connection()
    try:
        if name == "sqlite":
            connection.driver_connection.executescript(text)
        elif name == "postgresql":
            connection.driver_connection.execute(text)
        else:
            cursor = connection.cursor()
            # As mariadb-dump sets it: it writes the values of generated columns as well.
            cursor.execute("SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO'")
            for statement in statements(text):
                cursor.execute(statement)
        connection.commit()
    finally:
        # It has other settings now, such as an empty search path.
        connection.invalidate()


def made_now(text: str) -> str:
    """Move the times of a dump to the last minute: what it keeps for a day would be deleted, and schedules be late."""
    pattern = r"2026-\d\d-\d\d[ T]\d\d:\d\d:\d\d"
    latest = max(datetime.fromisoformat(each) for each in re.findall(pattern, text))
    # By whole minutes, as attempts are counted for each minute.
    passed = (datetime.now(UTC).replace(tzinfo=None) - latest) // timedelta(minutes=1) * timedelta(minutes=1)

    def moved(found: re.Match[str]) -> str:
        return (datetime.fromisoformat(found[0]) + passed).isoformat(found[0][10])

    return re.sub(pattern, moved, text)


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a dump of MariaDB: those of triggers end with two semicolons."""
    for number, part in enumerate(re.split(r"^DELIMITER .*$", text, flags=re.MULTILINE)):
        for statement in re.split(r";;\s*$" if number % 2 else r";\s*$", part, flags=re.MULTILINE):
            if statement.strip():
                yield statement


@pytest.fixture
def program(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program whose database it is, with this version of the library; its functions have the same names."""
    monkeypatch.setenv("SQLAQUEUE_URL", str(engine.url))
    found = importlib.util.spec_from_file_location("program", HERE / "program.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "program", module)
    found.loader.exec_module(module)
    module.sessions.configure(bind=engine)
    return module


def counts(engine: sa.Engine) -> dict[str, int]:
    with engine.connect() as connection:
        names = set(sa.inspect(connection).get_table_names()) - {"alembic_version"}
        return {
            name: connection.execute(sa.select(sa.func.count()).select_from(sa.table(name))).scalar_one()
            for name in names
        }


def run_all(session: Session, program: Any) -> None:
    """Do what today's workers do until nothing is due: rescue the jobs of the dead one, and run all."""
    for model in (program.PlainUpdate, program.FullUpdate, program.Ordered):
        session.execute(rescue(model))
    session.commit()
    for model in (*program.KEPT, *program.DELETED, program.Line, program.Import, program.Ticked):
        Consumer(model, program.run, program.sessions).drain()
    Consumer(program.Call, program.Call.run, program.sessions).drain()


@pytest.mark.every_combination
def test_a_database_of_the_first_version(engine: sa.Engine, program: Any, tmp_path: Path) -> None:
    load(engine)
    before = counts(engine)
    project = Project(tmp_path / "migrations", engine)
    text = project.migrate(program.Base)
    own = [name for name in before if name.startswith("sqlaqueue_")]
    assert len(own) >= 8
    has_comments = engine.dialect.name != "sqlite"
    assert text.split("def downgrade")[0].count("op.create_table_comment(") == len(own) * has_comments
    assert "op.drop_" not in text.split("def downgrade")[0]
    assert counts(engine) == before

    keys = sa.select(program.Sent.queue, program.Sent.key)
    done = sa.select(program.Effect.queue, program.Effect.key)
    with program.sessions() as session:
        paused = QueueAdmin(session, program.PLAIN[-1])
        assert paused.pause_info().reason == "the upgrade"
        paused.resume()
        missing = set(map(tuple, session.execute(keys))) - set(map(tuple, session.execute(done)))
        assert {queue for queue, _ in missing} >= {model.__tablename__ for model in program.KEPT}
        session.commit()

        def has_run_all() -> bool:
            run_all(session, program)
            left = set(map(tuple, session.execute(keys))) - set(map(tuple, session.execute(done)))
            session.commit()
            return not left

        # Some jobs fail once, and are due again in a moment.
        wait_until(has_run_all)
        noted = set(map(tuple, session.execute(done)))
        ticks = {("ticked", f"tick-{number}") for number in session.scalars(sa.select(program.Ticked.id))}
        assert len(ticks) > 0
        assert noted == set(map(tuple, session.execute(keys))) | ticks
        for model in program.KEPT:
            states = {key: str(state) for key, state in session.execute(sa.select(model.key, model.status))}
            ended = {key: "completed" for queue, key in noted if queue == model.__tablename__}
            assert states == ended | {"failed": "failed", "later": "pending", "cancelled": "cancelled"}
        for model in program.DELETED:
            assert session.scalars(sa.select(model.key)).all() == ["later"]
            assert [job.state for job in QueueAdmin(session, model).jobs()].count("failed") == 1
        for model in program.KEYED:
            if model.__queue__.attempt_history:
                (key,) = session.scalars(sa.select(model.id).where(model.key == "due-5"))
                assert [each.outcome for each in QueueAdmin(session, model).attempts(key)] == ["completed"]
        (schedule,) = ScheduleAdmin(session, program.Ticked).list()
        assert schedule.name == "ticked"
        models = [*program.KEPT, *program.DELETED, program.Import, program.Line, program.Ticked, program.Call]
        # The server itself is one for tests.
        assert [each for each in doctor(session, *models) if each.queue and each.severity == "critical"] == []
