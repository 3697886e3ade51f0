"""A table that has rows becomes a queue: what they are is asked for, and never guessed."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import QueueConfig, States, claim, complete, purge, reconcile
from tests.migrations.models import order
from tests.migrations.project import Project, dump
from tests.models.kind import STRATEGIES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Database

BY_ROW = """sa.text("CASE WHEN sent THEN 'completed' ELSE 'failed' END")"""

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
live_or_not = pytest.mark.parametrize("live", [False, True], ids=["in one transaction", "live"])


def plain() -> type[Any]:
    return order(None, sent=mapped_column(sa.Boolean, server_default=sa.false(), nullable=False))


def queue(config: QueueConfig, **attributes: Any) -> type[Any]:
    return order(config, sent=mapped_column(sa.Boolean, server_default=sa.false(), nullable=False), **attributes)


@pytest.fixture
def project(database: Database, tmp_path: Path, engine: sa.Engine) -> Project:
    """A project whose table ``orders`` has four rows, two of them sent, and is no queue."""
    project = Project(directory=tmp_path, database=database, metadata=plain().metadata)
    project.revise("create")
    project.upgrade()
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO orders (article, sent) SELECT n, n > 2 FROM generate_series(1, 4) AS n")
        )
    return project


def adopt(project: Project, model: type[Any], *, live: bool = False) -> str:
    project.metadata = model.metadata
    return project.revise("adopt", **({"live": "orders"} if live else {}))


def states(engine: sa.Engine) -> dict[str, Any]:
    with engine.connect() as connection:
        return {row.article: row.status for row in connection.execute(sa.text("SELECT article, status FROM orders"))}


def run_all(engine: sa.Engine, model: type[Any]) -> list[str]:
    with Session(engine) as session:
        jobs = session.scalars(claim(model, 100)).all()
        done = sorted(job.article for job in jobs)
        if jobs:
            session.execute(complete(jobs))
        session.commit()
        return done


@live_or_not
@every_strategy
def test_the_state_of_the_rows_is_asked_for(project: Project, engine: sa.Engine, strategy: str, *, live: bool) -> None:
    model = queue(QueueConfig(strategy=strategy))
    before = dump(project.database)
    adopt(project, model, live=live)
    with pytest.raises(CommandError, match=r"op\.add_queue_columns\('orders'\): the table may have rows"):
        project.upgrade()
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    project.check()
    assert set(states(engine).values()) == {"completed"}
    assert run_all(engine, model) == []
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO orders (article) VALUES ('new')"))
    assert run_all(engine, model) == ["new"]
    project.downgrade()
    assert dump(project.database) == before


@live_or_not
@every_strategy
def test_the_state_may_depend_on_the_row(project: Project, engine: sa.Engine, strategy: str, *, live: bool) -> None:
    model = queue(QueueConfig(strategy=strategy))
    adopt(project, model, live=live)
    project.edit("existing_rows=...", f"existing_rows={BY_ROW.replace('failed', 'pending')}")
    project.upgrade()
    project.check()
    assert states(engine) == {"1": "pending", "2": "pending", "3": "completed", "4": "completed"}
    with Session(engine) as session:
        assert session.scalars(reconcile(model)).all() == []
    assert run_all(engine, model) == ["1", "2"]


@live_or_not
def test_adopted_or_created_it_is_the_same(project: Project, server: Any, *, live: bool) -> None:
    """Column by column, which stand in another order in a table that was there before."""
    model = queue(QueueConfig(strategy="delete_returning"))
    adopt(project, model, live=live)
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    with server.database() as other:
        engine = sa.create_engine(other.url())
        model.metadata.create_all(engine)
        engine.dispose()
        lines, wanted = (
            sorted(line.rstrip(",") for line in dump(each).splitlines()) for each in (project.database, other)
        )
    assert lines == wanted


@live_or_not
def test_an_enum_for_the_state_is_created_and_dropped(project: Project, engine: sa.Engine, *, live: bool) -> None:
    states_ = sa.Enum("pending", "processing", "completed", "failed", "cancelled", name="order_state")
    config = QueueConfig(columns={"status": "state"})
    model = queue(config, state=mapped_column(states_, nullable=False, server_default="pending"))
    before = dump(project.database)
    text = adopt(project, model, live=live)
    assert "op.create_queue_enum('order_state'" in text
    # Its own column: how it comes to the rows that are there is the user's own migration.
    project.edit("server_default='pending'", "server_default='completed'")
    project.upgrade()
    assert run_all(engine, model) == []
    project.downgrade()
    assert dump(project.database) == before


def test_rows_that_are_their_own_messages_would_all_run(project: Project, engine: sa.Engine) -> None:
    model = queue(QueueConfig(strategy="delete_returning", rows_are_messages=True))
    adopt(project, model)
    with pytest.raises(CommandError, match="each row of the table is a job"):
        project.upgrade()
    project.edit("existing_rows=...", "existing_rows='completed'")
    with pytest.raises(CommandError, match="a queue without a status cannot store one"):
        project.upgrade()
    project.edit("existing_rows='completed'", "existing_rows='pending'")
    project.upgrade()
    project.check()
    assert run_all(engine, model) == ["1", "2", "3", "4"]


def test_a_state_that_the_column_cannot_hold_is_refused(project: Project) -> None:
    adopt(project, queue(QueueConfig(states=States(pending=0, processing=1, completed=2, failed=3, cancelled=4))))
    project.edit("existing_rows=...", "existing_rows='completed'")
    with pytest.raises(CommandError, match="the column status cannot store this value"):
        project.upgrade()
    project.edit("existing_rows='completed'", "existing_rows=2")
    project.upgrade()


@pytest.mark.parametrize("type_", [sa.Text(), sa.String(20), sa.Integer()], ids=repr)
def test_a_status_of_the_table_is_not_taken_by_accident(project: Project, engine: sa.Engine, type_: Any) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text(f"ALTER TABLE orders ADD COLUMN status {type_.compile(engine.dialect)}"))
    with pytest.raises(CommandError) as refused:
        adopt(project, queue(QueueConfig()))
    message = str(refused.value)
    assert "Order.status: the table orders has a column status of type" in message
    assert "QueueConfig(columns={'status': 'status'})" in message
    assert "QueueConfig(columns={'status': 'queue_status'})" in message


def test_a_column_of_another_type_is_not_taken_for_the_queue(project: Project, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE orders ADD COLUMN priority text"))
    with pytest.raises(CommandError, match=r"Order\.priority: the table orders has a column priority of type TEXT"):
        adopt(project, queue(QueueConfig()))


@every_strategy
def test_a_table_speaks_its_own_words(project: Project, engine: sa.Engine, strategy: str) -> None:
    """A table that has a state already needs no answer: the config says which of its words wait."""
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE orders ADD COLUMN state text NOT NULL DEFAULT 'draft'"))
        connection.execute(sa.text("UPDATE orders SET state = 'paid' WHERE article = '2'"))
    config = QueueConfig(strategy=strategy, columns={"status": "state"}, states=States(pending="paid"))
    model = queue(config, state=mapped_column(sa.Text, nullable=False, server_default="draft"))
    adopt(project, model)
    project.upgrade()
    project.check()
    assert run_all(engine, model) == ["2"]


def test_finished_rows_of_the_table_get_a_moment_if_they_are_given_one(project: Project, engine: sa.Engine) -> None:
    """The question about the rows names the statement; without it a purge by age leaves them where they are."""
    model = queue(QueueConfig())
    adopt(project, model)
    with pytest.raises(CommandError, match="have no finished_at") as refused:
        project.upgrade()
    statement = re.search(r'op\.execute\("([^"]+)"\)', str(refused.value))
    assert statement is not None
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()

    def purged() -> int:
        with Session(engine) as session, session.begin():
            return len(session.scalars(purge(model, older_than=timedelta(0))).all())

    assert purged() == 0
    with engine.begin() as connection:
        connection.exec_driver_sql(statement[1])
    assert purged() == 4
