"""Autogenerate and the partitions of a queue's table, which are in no model: they are neither dropped nor changed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import mapped_column

from sqlaqueue import QueueConfig
from tests.migrations.models import enqueue, order, run_all
from tests.migrations.project import changed, execute

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.migrations.project import Project
    from tests.servers import Database

    MakeProject = Callable[[type[Any]], Project]

PARTITIONS = (
    "CREATE TABLE orders_old PARTITION OF orders FOR VALUES FROM (MINVALUE) TO ('2026-01-01')",
    "CREATE TABLE orders_new PARTITION OF orders FOR VALUES FROM ('2026-01-01') TO (MAXVALUE) PARTITION BY HASH (id)",
    "CREATE TABLE orders_new_0 PARTITION OF orders_new FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE orders_new_1 PARTITION OF orders_new FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
)


def partitioned(*, is_queue: bool = True, **options: Any) -> type[Any]:
    config = QueueConfig(columns={"created_at": "created_at"}, **options)
    created_at = mapped_column(sa.DateTime(timezone=True), primary_key=True, server_default=sa.func.now())
    arguments = {"postgresql_partition_by": "RANGE (created_at)"}
    key = mapped_column(sa.Integer, sa.Identity(), primary_key=True)
    return order(config if is_queue else None, __table_args__=arguments, id=key, created_at=created_at)


def partitions_of(database: Database) -> list[str]:
    with database.connect() as connection:
        tree = connection.execute("SELECT relid::regclass::text FROM pg_partition_tree('orders') WHERE level > 0")
        return sorted(row[0] for row in tree)


@pytest.mark.parametrize(
    "strategy", ["update_status", pytest.param("batch_select", marks=pytest.mark.thorough), "delete_returning"]
)
def test_partitions_are_no_difference(database: Database, engine: sa.Engine, make: MakeProject, strategy: str) -> None:
    project = make(partitioned(strategy=strategy))
    execute(engine, *PARTITIONS)
    project.check()
    model = partitioned(strategy=strategy)
    project.metadata = model.metadata
    enqueue(engine, model, "new")
    enqueue(engine, model, "old", created_at=datetime.fromisoformat("2025-12-31T00:00Z"))
    assert run_all(engine, model) == ["new", "old"]
    project.check()


def test_changes_of_the_queue_reach_the_partitions(database: Database, engine: sa.Engine, make: MakeProject) -> None:
    """Indexes and triggers of the table are replaced, with those of its partitions; nothing else is."""
    project = make(partitioned(strategy="update_status"))
    execute(engine, *PARTITIONS)
    enqueue(engine, partitioned(strategy="update_status"), "waiting")
    for options in (
        {"strategy": "update_status", "retention": {"completed": timedelta(days=1)}},
        {"strategy": "batch_select"},
        {"strategy": "delete_returning"},
        {"strategy": "update_status", "notify": False},
    ):
        text = changed(project, partitioned(**options))
        assert "orders_old" not in text
        assert "orders_new" not in text
    assert len(partitions_of(database)) == 4
    assert run_all(engine, partitioned(strategy="update_status", notify=False)) == ["waiting"]


def test_a_partitioned_table_becomes_a_queue(database: Database, engine: sa.Engine, make: MakeProject) -> None:
    project = make(partitioned(is_queue=False))
    execute(engine, *PARTITIONS, "INSERT INTO orders (id, article) VALUES (1, 'stored')")
    model = partitioned()
    project.metadata = model.metadata
    text = project.revise("adopt")
    assert "orders_old" not in text
    project.edit("existing_rows=...", "existing_rows='pending'")
    project.upgrade()
    project.check()
    assert len(partitions_of(database)) == 4
    assert run_all(engine, model) == ["stored"]


def test_a_dropped_queue_takes_its_partitions_with_it(database: Database, engine: sa.Engine, make: MakeProject) -> None:
    project = make(partitioned())
    execute(engine, *PARTITIONS)
    project.metadata = sa.MetaData()
    project.revise("drop")
    project.upgrade()
    project.check()
    with database.connect() as connection:
        assert connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'orders%'").fetchall() == []


def test_a_detached_partition_is_a_table_like_any_other(engine: sa.Engine, make: MakeProject) -> None:
    project = make(partitioned())
    execute(engine, *PARTITIONS, "ALTER TABLE orders DETACH PARTITION orders_old")
    assert "op.drop_table('orders_old')" in project.revise("drop")
