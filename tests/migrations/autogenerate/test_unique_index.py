"""The unique index of ``QueueConfig(unique=...)``: autogenerate creates, replaces and drops it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import mapped_column

from sqlaqueue import QueueConfig, States, Unique
from tests.migrations.models import order
from tests.migrations.project import changed, dump, execute, in_any_order, wanted

if TYPE_CHECKING:
    from tests.servers import Database

NAME = "ix_orders_queue_unique"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FINISHED_AS_WELL = ("pending", "processing", "completed")


def unique(config: Unique | None, **options: Any) -> type[Any]:
    """Map a queue with a column whose name must be quoted."""
    return order(QueueConfig(unique=config, **options), kind=mapped_column("Kind", sa.Text))


CHANGES = {
    "added": (None, Unique("article", "kind")),
    "added with all options": (None, Unique("kind", per=HOUR, nulls_distinct=False, states=FINISHED_AS_WELL)),
    "removed": (Unique("article", "kind", per=HOUR, nulls_distinct=False), None),
    "another attribute": (Unique("article"), Unique("kind")),
    "one more attribute": (Unique("article"), Unique("article", "kind")),
    "other states": (Unique("article"), Unique("article", states=FINISHED_AS_WELL)),
    "a period": (Unique("article"), Unique("article", per=HOUR)),
    "another period": (Unique("article", per=HOUR), Unique("article", per=DAY)),
    "no period": (Unique("article", per=HOUR), Unique("article")),
    "equal nulls": (Unique("kind"), Unique("kind", nulls_distinct=False)),
    "distinct nulls": (Unique("kind", nulls_distinct=False), Unique("kind")),
}


THOROUGH = {"one more attribute", "no period", "distinct nulls"}


@pytest.mark.parametrize(
    "change", [pytest.param(each, marks=pytest.mark.thorough) if each in THOROUGH else each for each in CHANGES]
)
def test_a_change_of_the_configuration(database: Database, make: Any, change: str) -> None:
    before, after = (unique(each) for each in CHANGES[change])
    changed(make(before), after)
    assert dump(database) == wanted(after, database)


@pytest.mark.parametrize("timezone", [True, False], ids=["timestamptz", "timestamp"])
def test_the_settings_of_a_session_are_no_difference(
    database: Database, make: Any, engine: sa.Engine, *, timezone: bool
) -> None:
    """PostgreSQL prints intervals and times in the style of the session."""

    def model(per: timedelta) -> type[Any]:
        created_at = mapped_column(sa.DateTime(timezone=timezone), server_default=sa.func.now())
        config = QueueConfig(unique=Unique("article", per=per), columns={"created_at": "made_at"})
        return order(config, made_at=created_at)

    project = make(model(HOUR))
    execute(
        engine,
        f"ALTER DATABASE {database.name} SET timezone = 'America/New_York'",
        f"ALTER DATABASE {database.name} SET intervalstyle = 'iso_8601'",
        f"ALTER DATABASE {database.name} SET datestyle = 'SQL, DMY'",
    )
    project.check()
    assert NAME not in project.revise("nothing")
    project.upgrade()
    changed(project, model(DAY))
    project.check()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {database.name} RESET ALL")
    project.check()
    assert dump(database) == wanted(model(DAY), database)


BY_HAND = {
    "no predicate": "CREATE UNIQUE INDEX {} ON orders (article, date_bin('1 hour', created_at, to_timestamp(345600)))",
    "another origin": "CREATE UNIQUE INDEX {} ON orders (article, date_bin('1 hour', created_at, to_timestamp(0)))",
    "not unique": "CREATE INDEX {} ON orders (article, date_bin('1 hour', created_at, to_timestamp(345600)))",
    "another order": 'CREATE UNIQUE INDEX {} ON orders ("Kind", article)',
}


@pytest.mark.parametrize("index", BY_HAND)
def test_an_index_made_by_hand_is_replaced(database: Database, make: Any, engine: sa.Engine, index: str) -> None:
    """And restored by the downgrade."""
    model = unique(Unique("article", per=HOUR))
    project = make(model)
    where = "" if index == "no predicate" else " WHERE status = 'pending' OR status = 'processing'"
    execute(engine, f"DROP INDEX {NAME}", BY_HAND[index].format(NAME) + where)
    changed(project)
    assert dump(database) == wanted(model, database)


def test_an_index_in_another_spelling_is_no_difference(make: Any, engine: sa.Engine) -> None:
    project = make(unique(Unique("article", per=HOUR)))
    execute(
        engine,
        f"DROP INDEX {NAME}",
        f"""CREATE UNIQUE INDEX {NAME} ON orders
            ((article), (date_bin(interval '3600 seconds', "created_at", to_timestamp(345600))))
            WHERE ((status = 'pending') OR (((status)) = 'processing'))""",
    )
    project.check()


@pytest.mark.parametrize("live", [False, True], ids=["in one transaction", "live"])
def test_unusual_names_and_states(database: Database, make: Any, *, live: bool) -> None:
    """Colons, percent signs and quotes in states, in a column and in the name of the table."""

    def model(config: Unique | None) -> type[Any]:
        states = States(pending="is :new 100% it's", processing='"busy"')
        attributes: Any = {
            "__tablename__": "The orders :all 100%",
            "article": mapped_column("the 'article' :x 5%", sa.Text),
        }
        return order(QueueConfig(unique=config, states=states), **attributes)

    project = make(model(None))
    states = []
    after = model(Unique("article", per=HOUR, nulls_distinct=False))
    for target in (after, model(Unique("article")), after):
        states.append(in_any_order(dump(database)))
        project.metadata = target.metadata
        project.revise("change", **({"live": "The orders :all 100%"} if live else {}))
        project.upgrade()
        project.check()
        assert in_any_order(dump(database)) == in_any_order(wanted(target, database))
    while states:
        project.downgrade()
        assert in_any_order(dump(database)) == states.pop()


def test_a_queue_without_a_status(database: Database, make: Any) -> None:
    options = {"strategy": "delete_returning", "rows_are_messages": True}
    project = make(unique(None, **options))
    changed(project, unique(Unique("article"), **options))
    changed(project, unique(Unique("article", "kind", per=HOUR), **options))
    assert dump(database) == wanted(unique(Unique("article", "kind", per=HOUR), **options), database)
    changed(project, unique(None, **options))


def test_a_new_queue_and_its_end(database: Database, make: Any) -> None:
    """For an empty table the index is created by Alembic's own operation."""
    project = make(type("Empty", (), {"metadata": sa.MetaData()}))
    model = unique(Unique("article", per=HOUR, nulls_distinct=False))
    text = changed(project, model)
    assert "create_queue_unique_index" not in text
    assert dump(database) == wanted(model, database)
    changed(project, type("Empty", (), {"metadata": sa.MetaData()}))


def test_a_unique_queue_becomes_a_plain_table(database: Database, make: Any) -> None:
    project = make(unique(Unique("kind", per=HOUR)))
    before = dump(database)
    project.metadata = order(None, kind=mapped_column("Kind", sa.Text)).metadata
    text = project.revise("no queue")
    assert "existing_rows=..." in text
    project.upgrade()
    project.check()
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(before)


def test_an_index_that_the_filters_leave_out(make: Any, engine: sa.Engine) -> None:

    def include_object(_: Any, name: str | None, kind: str, *__: Any) -> bool:
        return kind != "index" or name != NAME

    project = make(unique(Unique("article", per=HOUR)), include_object=include_object)
    execute(engine, f"CREATE UNIQUE INDEX {NAME} ON orders (article)")
    assert NAME not in project.revise("nothing")


def test_a_table_becomes_a_unique_queue(make: Any) -> None:
    """The index is created after the columns of its predicate."""
    project = make(order(None, kind=mapped_column("Kind", sa.Text)))
    project.metadata = unique(Unique("kind")).metadata
    text = project.revise("adopt")
    assert text.index("op.add_queue_columns(") < text.index("op.create_queue_unique_index(")
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    project.check()
