"""Migrations of queues whose jobs wait for others."""

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, Session, mapped_column, relationship

from sqlaqueue import QueueConfig, QueueMixin, WaitFor, claim, complete
from tests.alembic.conftest import Project, changed, dump, new_base, wanted
from tests.servers import Database

WAITS = {"batch": "rows", "dependent": WaitFor("first", on_failure="cancel")}


def models(kind: str, *, waits: bool = True, **options: Any) -> tuple[type[Any], type[Any]]:
    """Return a class whose jobs wait, and that of the jobs that they wait for."""
    base: Any = new_base()
    config = QueueConfig(waits_for=WAITS[kind], **options) if waits else QueueConfig(**options)
    if kind == "batch":

        class Import(QueueMixin, base):
            __tablename__ = "import"
            __queue__ = config
            id: Mapped[int] = mapped_column(primary_key=True)
            rows: Mapped[list["Row"]] = relationship()

        class Row(QueueMixin, base):
            __tablename__ = "row"
            id: Mapped[int] = mapped_column(primary_key=True)
            import_id: Mapped[int | None] = mapped_column(ForeignKey("import.id"), index=True)

        return Import, Row

    class First(QueueMixin, base):
        __tablename__ = "first"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Second(QueueMixin, base):
        __tablename__ = "second"
        __queue__ = config
        id: Mapped[int] = mapped_column(primary_key=True)
        first_id: Mapped[int | None] = mapped_column(ForeignKey("first.id"))
        first: Mapped[First | None] = relationship()

    return Second, First


@pytest.mark.parametrize("kind", WAITS)
def test_a_new_queue_has_all_of_it(database: Database, make: Any, kind: str) -> None:
    empty = dump(database)
    waiting, _ = models(kind)
    project: Project = make(waiting)
    project.check()
    assert dump(database) == wanted(waiting, database)
    project.downgrade()
    assert dump(database) == empty


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", WAITS)
def test_it_is_added_and_removed(database: Database, make: Any, kind: str) -> None:
    plain, _ = models(kind, waits=False)
    project: Project = make(plain)
    before = dump(database)
    waiting, _ = models(kind)
    changed(project, waiting)
    project.check()
    assert dump(database) == wanted(waiting, database)
    changed(project, plain)
    project.check()
    assert dump(database) == before


def test_jobs_wait_after_a_migration(make: Any, engine: sa.Engine) -> None:
    waiting, awaited = models("batch")
    make(waiting)
    with Session(engine) as session:
        batch = waiting(rows=[awaited()])
        session.add(batch)
        session.commit()
        assert batch.status == "waiting"
        session.execute(complete(session.scalars(claim(awaited, 1)).all()))
        session.commit()
        assert batch.status == "pending"


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", WAITS)
def test_existing_jobs_wait_and_become_pending_again(make: Any, engine: sa.Engine, kind: str) -> None:
    plain, other = models(kind, waits=False)
    project: Project = make(plain)
    with Session(engine) as session:
        session.add_all([plain(), other(), other(status="completed")])
        session.flush()
        if kind == "batch":
            session.execute(sa.update(other).values(import_id=1))
        else:
            session.add_all([plain(first_id=1), plain(first_id=2)])
        session.commit()
    waiting, _ = models(kind)
    changed(project, waiting)
    status = sa.select(waiting.status, waiting.waits_for_count).order_by(waiting.id)
    with engine.connect() as connection:
        rows = connection.execute(status).all()
        assert rows == [("waiting", 1)] if kind == "batch" else [("pending", 0), ("waiting", 1), ("pending", 0)]
    changed(project, plain)
    with engine.connect() as connection:
        assert {*connection.scalars(sa.select(plain.status))} == {"pending"}
