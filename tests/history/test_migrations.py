"""Autogenerate creates the table of attempts with the option, and drops it without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, QueueConfig, admin
from tests.migrations.conftest import engine, make, no_bytecode  # noqa: F401 - fixtures are found by being here
from tests.migrations.models import order
from tests.migrations.project import changed, dump, in_any_order, wanted

if TYPE_CHECKING:
    from tests.servers import Database


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_the_table_is_created_and_dropped(database: Database, make: Any, strategy: str) -> None:  # noqa: F811 - a fixture
    without = order(QueueConfig(strategy=strategy))
    project = make(without)
    kept = order(QueueConfig(strategy=strategy, attempt_history=60))
    text = changed(project, kept)
    assert "sqlaqueue_attempt" in text
    assert in_any_order(dump(database)) == in_any_order(wanted(kept, database))
    sql_engine = sa.create_engine(database.url())
    with Session(sql_engine) as session:
        session.add(kept(article="a"))
        session.commit()
    Consumer(kept, lambda session, job: None, sessionmaker(sql_engine)).drain()
    with Session(sql_engine) as session:
        assert [one.outcome for one in admin.attempts(session, kept, 1)] == ["completed"]
    sql_engine.dispose()
    # Another time is no difference in the database.
    project.metadata = order(QueueConfig(strategy=strategy, attempt_history=3600)).metadata
    project.check()
    assert "op.drop_table('sqlaqueue_attempt')" in changed(project, without)
    assert in_any_order(dump(database)) == in_any_order(wanted(without, database))


def test_names_do_not_depend_on_a_naming_convention() -> None:
    model = order(QueueConfig(attempt_history=60))
    (table,) = [table for table in model.metadata.tables.values() if table.name == "sqlaqueue_attempt"]
    assert {index.name for index in table.indexes} == {"ix_sqlaqueue_attempt_job", "ix_sqlaqueue_attempt_ended"}
