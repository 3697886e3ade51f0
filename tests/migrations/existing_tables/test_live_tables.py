"""``-x live=table``: steps that do not block other sessions, and can be run again after an interruption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim
from tests.migrations.models import enqueue, order, run_all
from tests.migrations.project import Project, dump, execute, in_any_order, wanted

if TYPE_CHECKING:
    from tests.servers import Database

BY_ROW = """sa.text("CASE WHEN sent THEN 'completed' ELSE 'pending' END")"""


def sent() -> Any:
    return mapped_column(sa.Boolean, nullable=False, server_default=sa.false())


def upgrade_with_interruption(project: Project) -> None:
    """Interrupt an upgrade before its last commit, and run it again."""
    project.edit("\ndef downgrade", "    raise InterruptedError\n\n\ndef downgrade")
    with pytest.raises(InterruptedError):
        project.upgrade()
    project.edit("    raise InterruptedError\n", "")
    project.upgrade()
    project.check()


@pytest.mark.parametrize("answer", ["'pending'", BY_ROW], ids=["one state", "by row"])
def test_an_interrupted_adoption_can_be_run_again(
    database: Database, make: Any, engine: sa.Engine, answer: str
) -> None:
    """Together with another new table, and with a dropped column that the expression for the status reads."""
    project = make(order(None, sent=sent()))
    execute(engine, "INSERT INTO orders (article) VALUES ('1')")
    before = dump(database)
    model = order(QueueConfig(strategy="delete_returning"), kind=mapped_column(sa.Text, index=True))
    sa.Table(
        "other", model.metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("x", sa.Text, index=True)
    )
    project.metadata = model.metadata
    project.revise("adopt", live="orders")
    project.edit("existing_rows=...", f"existing_rows={answer}")
    upgrade_with_interruption(project)
    assert in_any_order(dump(database)) == in_any_order(wanted(model, database))
    assert run_all(engine, model) == ["1"]
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param({}, {"columns": {"priority": None}}, id="drop a column"),
        pytest.param(
            {"strategy": "delete_returning", "columns": {"priority": None}},
            {},
            id="change the strategy and add a column",
        ),
        *(
            pytest.param(*pair, id=name, marks=pytest.mark.thorough)
            for name, pair in {
                "add a column": ({"columns": {"priority": None}}, {}),
                "add messages": ({}, {"strategy": "delete_returning"}),
                "drop messages": ({"strategy": "delete_returning"}, {}),
                "drop a column of messages": (
                    {"strategy": "delete_returning"},
                    {"strategy": "delete_returning", "columns": {"priority": None}},
                ),
            }.items()
        ),
    ],
)
def test_an_interrupted_change_can_be_run_again(
    database: Database, make: Any, engine: sa.Engine, old: dict[str, Any], new: dict[str, Any]
) -> None:
    before, after = order(QueueConfig(**old)), order(QueueConfig(**new))
    project = make(before)
    enqueue(engine, before, "1", "2")
    schema = dump(database)
    project.metadata = after.metadata
    project.revise("change", live="orders")
    upgrade_with_interruption(project)
    assert in_any_order(dump(database)) == in_any_order(wanted(after, database))
    with Session(engine) as session:
        assert [job.article for job in session.scalars(claim(after, 5))] == ["1", "2"]
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(schema)
    assert run_all(engine, before) == ["1", "2"]


def test_an_index_keeps_its_options(database: Database, make: Any) -> None:
    """An index of the application on the same table."""
    options: dict[str, Any] = {
        "postgresql_using": "gin",
        "postgresql_ops": {"tags": "array_ops"},
        "postgresql_with": {"fastupdate": "off"},
    }
    project = make(order(None, tags=mapped_column(sa.ARRAY(sa.Text))))
    indexes = (
        sa.Index("ix_tags", "tags", **options),
        sa.Index("ix_article", sa.text("lower(article)"), unique=True, postgresql_include=["tags"]),
    )
    model = order(QueueConfig(), __table_args__=indexes, tags=mapped_column(sa.ARRAY(sa.Text)))
    project.metadata = model.metadata
    project.revise("adopt", live="orders")
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    assert in_any_order(dump(database)) == in_any_order(wanted(model, database))


@pytest.mark.parametrize("strategy", ["update_status", "delete_returning"])
def test_a_partitioned_table(database: Database, make: Any, engine: sa.Engine, strategy: str) -> None:
    def model(*bases: type[Any], **attributes: Any) -> type[Any]:
        class Base(DeclarativeBase):
            pass

        body = {
            "__tablename__": "orders",
            "__table_args__": {"postgresql_partition_by": "HASH (id)"},
            "id": mapped_column(sa.Integer, primary_key=True),
            "article": mapped_column(sa.Text, nullable=False),
            **attributes,
        }
        return type("Order", (*bases, Base), body)

    def include_name(name: str | None, kind: str, _: Any) -> bool:
        return kind != "table" or not (name or "").startswith("part")

    project = make(model(), include_name=include_name)
    execute(
        engine,
        *(f"CREATE TABLE part{n} PARTITION OF orders FOR VALUES WITH (MODULUS 2, REMAINDER {n})" for n in range(2)),
        "INSERT INTO orders SELECT n, n FROM generate_series(1, 100) AS n",
    )
    queue = model(QueueMixin, __queue__=QueueConfig(strategy=strategy))
    project.metadata = queue.metadata
    if strategy == "update_status":
        with pytest.raises(CommandError, match="-x live=orders: the table is partitioned"):
            project.revise("adopt", live="orders")
        return
    project.revise("adopt", live="orders")
    answer = """sa.text("CASE WHEN id % 50 = 0 THEN 'pending' ELSE 'completed' END")"""
    project.edit("existing_rows=...", f"existing_rows={answer}")
    project.upgrade()
    project.check()
    assert run_all(engine, queue) == ["100", "50"]


def test_a_misspelled_table_is_refused(make: Any) -> None:
    project = make(order(QueueConfig()))
    project.metadata = order(QueueConfig(notify=False)).metadata
    with pytest.raises(CommandError, match="-x live=order, theirs: no queue of the models has a table of that name"):
        project.revise("switch", live="order,orders,theirs")
