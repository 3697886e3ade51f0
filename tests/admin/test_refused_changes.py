"""One job that the database refuses to change keeps no other from being changed, and is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique, admin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Database

N, BAD = 20, 7
CHECK = "ALTER TABLE task ADD CONSTRAINT good CHECK (id <> 7) NOT VALID"
DEFERRED = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE OR DELETE ON task DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (OLD.id = 7) EXECUTE FUNCTION refuse()
"""
REFERENCE = "CREATE TABLE child (task_id integer REFERENCES task (id)); INSERT INTO child VALUES (7)"


class Base(DeclarativeBase):
    pass


class Task(QueueMixin, Base):
    __tablename__ = "task"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)


class OnceBase(DeclarativeBase):
    pass


class Once(QueueMixin, OnceBase):
    __tablename__ = "task"
    __queue__ = QueueConfig(strategy="update_status", unique=Unique("note"))
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]


@pytest.fixture
def session(database: Database, model: type[Any]) -> Iterator[Session]:
    engine = sa.create_engine(database.url())
    model.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([model(**({"note": str(n)} if model is Once else {})) for n in range(N)])
        session.commit()
        yield session
    engine.dispose()


CHANGES = {
    "requeue": ("status = 'failed'", CHECK, admin.requeue),
    "cancel": ("status = 'pending'", CHECK, lambda *arguments: len(admin.cancel(*arguments).cancelled)),
    "purge": ("status = 'completed', finished_at = now()", REFERENCE, admin.purge),
    "rescue": ("status = 'processing', lease_expires_at = now() - interval '1 hour'", CHECK, admin.rescue),
}


@pytest.mark.each_value
@pytest.mark.parametrize("model", [Task, Once])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("deferred", [False, True])
def test_the_others_are_changed(
    session: Session, model: type[Any], change: str, caplog: Any, *, deferred: bool
) -> None:
    """A deferred constraint is checked at the commit, which would undo the changes of all."""
    state, refusal, function = CHANGES[change]
    session.execute(sa.text(f"UPDATE task SET {state}"))
    session.execute(sa.text(DEFERRED if deferred else refusal))
    session.commit()
    before = session.scalar(sa.text(f"SELECT status FROM task WHERE id = {BAD}"))
    assert function(session, model) == N - 1
    assert session.scalar(sa.text(f"SELECT status FROM task WHERE id = {BAD}")) == before
    left = sa.text("SELECT count(*) FROM task WHERE status = :status")
    assert session.scalar(left, {"status": before}) == 1
    named = [record.job_key for record in caplog.records if getattr(record, "event", None) == "change_refused"]
    assert named == [BAD]


@pytest.mark.parametrize("model", [Task])
def test_a_batch_of_one_is_one_of_many(session: Session, caplog: Any) -> None:
    """Whether the refused job is alone in its batch is a matter of chance."""
    state, refusal, function = CHANGES["purge"]
    session.execute(sa.text(f"UPDATE task SET {state}"))
    session.execute(sa.text(refusal))
    session.commit()
    assert function(session, Task, batch_size=1) == N - 1
    assert [record.job_key for record in caplog.records if getattr(record, "event", None) == "change_refused"] == [BAD]


@pytest.mark.parametrize("model", [Task])
def test_a_job_that_is_changed_by_itself_raises_the_error(session: Session) -> None:
    session.execute(sa.text("UPDATE task SET status = 'failed'"))
    session.execute(sa.text(CHECK))
    session.commit()
    with pytest.raises(sa.exc.IntegrityError, match="good"):
        admin.requeue(session, session.get(Task, BAD))
