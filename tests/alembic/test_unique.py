"""The unique index of ``QueueConfig(unique=...)``, and the duplicates in a table that refuse it."""

import re
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.orm import DeclarativeBase, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, States, Unique
from sqlaqueue.alembic import operations_on_rows
from tests.alembic.conftest import Project, changed, dump, execute, in_any_order, order, set_for_all, wanted
from tests.alembic.test_live import upgrade_with_interruption
from tests.servers import Database

NAME = "ix_orders_queue_unique"
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
FINISHED_AS_WELL = ("pending", "processing", "completed")


def unique(config: Unique | None, **options: Any) -> type[Any]:
    """Map a queue with a column whose name must be quoted."""
    return order(QueueConfig(unique=config, **options), kind=mapped_column("Kind", sa.Text))


CHANGES = {
    "added": (None, Unique("article", "kind")),
    "added with all options": (None, Unique("kind", within=HOUR, nulls_distinct=False, states=FINISHED_AS_WELL)),
    "removed": (Unique("article", "kind", within=HOUR, nulls_distinct=False), None),
    "another attribute": (Unique("article"), Unique("kind")),
    "one more attribute": (Unique("article"), Unique("article", "kind")),
    "other states": (Unique("article"), Unique("article", states=FINISHED_AS_WELL)),
    "a period": (Unique("article"), Unique("article", within=HOUR)),
    "another period": (Unique("article", within=HOUR), Unique("article", within=DAY)),
    "no period": (Unique("article", within=HOUR), Unique("article")),
    "equal nulls": (Unique("kind"), Unique("kind", nulls_distinct=False)),
    "distinct nulls": (Unique("kind", nulls_distinct=False), Unique("kind")),
}
THOROUGH = {"one more attribute", "no period", "distinct nulls"}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "change", [pytest.param(each, marks=pytest.mark.thorough) if each in THOROUGH else each for each in CHANGES]
)
def test_a_change_of_the_attributes_that_are_unique(database: Database, make: Any, change: str) -> None:
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
        config = QueueConfig(unique=Unique("article", within=per), columns={"created_at": "made_at"})
        return order(config, made_at=created_at)

    project = make(model(HOUR))
    settings = ("timezone = 'America/New_York'", "intervalstyle = 'iso_8601'", "datestyle = 'SQL, DMY'")
    set_for_all(database, *(f"SET {setting}" for setting in settings))
    project.check()
    assert NAME not in project.revise("nothing")
    project.upgrade()
    changed(project, model(DAY))
    project.check()
    set_for_all(database, "RESET ALL")
    project.check()
    assert dump(database) == wanted(model(DAY), database)


BY_HAND = {
    "no predicate": "CREATE UNIQUE INDEX {} ON orders (article, date_bin('1 hour', created_at, to_timestamp(345600)))",
    "another origin": "CREATE UNIQUE INDEX {} ON orders (article, date_bin('1 hour', created_at, to_timestamp(0)))",
    "not unique": "CREATE INDEX {} ON orders (article, date_bin('1 hour', created_at, to_timestamp(345600)))",
    "another order": 'CREATE UNIQUE INDEX {} ON orders ("Kind", article)',
}


@pytest.mark.few(1)
@pytest.mark.parametrize("index", BY_HAND)
def test_an_index_made_by_hand_is_replaced(database: Database, make: Any, engine: sa.Engine, index: str) -> None:
    """And restored by the downgrade."""
    model = unique(Unique("article", within=HOUR))
    project = make(model)
    where = "" if index == "no predicate" else " WHERE status = 'pending' OR status = 'processing'"
    execute(engine, f"DROP INDEX {NAME}", BY_HAND[index].format(NAME) + where)
    changed(project)
    assert dump(database) == wanted(model, database)


def test_an_index_in_another_spelling_is_no_difference(make: Any, engine: sa.Engine) -> None:
    project = make(unique(Unique("article", within=HOUR)))
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
    after = model(Unique("article", within=HOUR, nulls_distinct=False))
    for target in (after, model(Unique("article")), after):
        states.append(in_any_order(dump(database)))
        project.revise("change", target, **({"live": "The orders :all 100%"} if live else {}))
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
    changed(project, unique(Unique("article", "kind", within=HOUR), **options))
    assert dump(database) == wanted(unique(Unique("article", "kind", within=HOUR), **options), database)
    changed(project, unique(None, **options))


def test_a_new_queue_and_its_end(database: Database, make: Any) -> None:
    """For an empty table the index is created by Alembic's own operation."""
    project = make(type("Empty", (), {"metadata": sa.MetaData()}))
    model = unique(Unique("article", within=HOUR, nulls_distinct=False))
    text = changed(project, model)
    assert "create_queue_unique_index" not in text
    assert dump(database) == wanted(model, database)
    changed(project, type("Empty", (), {"metadata": sa.MetaData()}))


def test_a_unique_queue_becomes_a_plain_table(database: Database, make: Any) -> None:
    project = make(unique(Unique("kind", within=HOUR)))
    before = dump(database)
    text = project.revise("no queue", order(None, kind=mapped_column("Kind", sa.Text)))
    assert "existing_rows=..." in text
    project.upgrade()
    project.check()
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(before)


def test_an_index_that_the_filters_leave_out(make: Any, engine: sa.Engine) -> None:

    def include_object(_: Any, name: str | None, kind: str, *__: Any) -> bool:
        return kind != "index" or name != NAME

    project = make(unique(Unique("article", within=HOUR)), include_object=include_object)
    execute(engine, f"CREATE UNIQUE INDEX {NAME} ON orders (article)")
    assert NAME not in project.revise("nothing")


def test_a_table_becomes_a_unique_queue(make: Any) -> None:
    """The index is created after the columns of its predicate."""
    project = make(order(None, kind=mapped_column("Kind", sa.Text)))
    text = project.revise("adopt", unique(Unique("kind")))
    assert text.index("op.add_queue_columns(") < text.index("op.create_queue_unique_index(")
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    project.check()


# -- migrations that create a unique index, and find duplicates: they are refused with the query that shows them -------

INVALID = f"SELECT count(*) FROM pg_index WHERE NOT indisvalid OR indexrelid = to_regclass('{NAME}_new')"
live_or_not = pytest.mark.parametrize("live", [False, True], ids=["in one transaction", "live"])


def queue(unique: Unique | None) -> type[Any]:
    return order(QueueConfig(unique=unique), kind=mapped_column("Kind", sa.Text))


def insert(engine: sa.Engine, *rows: tuple[Any, ...]) -> None:
    """Insert rows of an article, a kind, and optionally a status and the time of creation."""
    columns = ["article", '"Kind"', "status", "created_at"]
    with engine.begin() as connection:
        for row in rows:
            names = ", ".join(columns[: len(row)])
            values = ", ".join("NULL" if value is None else f"'{value}'" for value in row)
            connection.exec_driver_sql(f"INSERT INTO orders ({names}) VALUES ({values})")


def revise(project: Project, model: type[Any], *, live: bool) -> str:
    project.metadata = model.metadata
    return project.revise("unique", **({"live": "orders"} if live else {}))


def refused(project: Project) -> str:
    """Upgrade, which is refused, and return the query in the error message."""
    with pytest.raises(CommandError, match=f"orders: the unique index {NAME} cannot be created") as error:
        project.upgrade()
    message = str(error.value)
    assert "Cancel or delete all but one of each, and run the migration again" in message
    query = re.search(r"\n\n(SELECT .*;)$", message, re.DOTALL)
    assert query is not None
    return query[1]


def duplicates(engine: sa.Engine, query: str) -> list[list[int]]:
    with engine.connect() as connection:
        return sorted(row.array_agg for row in connection.exec_driver_sql(query))


def invalid(engine: sa.Engine) -> int:
    """Return the number of indexes that an interrupted migration has left."""
    with engine.connect() as connection:
        return int(connection.scalar(sa.text(INVALID)) or 0)


MONDAY = "2026-01-05 10"
ROWS = [
    ("a", "x", "pending", f"{MONDAY}:00+00"),
    ("a", "x", "processing", f"{MONDAY}:59+00"),
    ("a", "x", "completed", f"{MONDAY}:00+00"),
    ("a", None, "pending", f"{MONDAY}:30+00"),
    ("a", None, "pending", "2026-01-05 11:00+00"),
    ("b", "x", "pending", f"{MONDAY}:00+00"),
    ("b", "y", "completed", f"{MONDAY}:00+00"),
    ("b", "y", "pending", f"{MONDAY}:00+00"),
]
CONFIGURATIONS = {
    "one attribute": (Unique("article"), [[1, 2, 4, 5], [6, 8]]),
    "two attributes": (Unique("article", "kind"), [[1, 2]]),
    "equal nulls": (Unique("article", "kind", nulls_distinct=False), [[1, 2], [4, 5]]),
    "only pending": (Unique("article", states=("pending",), on_return="wait"), [[1, 4, 5], [6, 8]]),
    "finished as well": (Unique("article", "kind", states=("pending", "processing", "completed")), [[1, 2, 3], [7, 8]]),
    "a period": (Unique("article", within=HOUR), [[1, 2, 4], [6, 8]]),
    "a period and equal nulls": (Unique("kind", within=HOUR, nulls_distinct=False), [[1, 2, 6]]),
}
THOROUGH_DUPLICATES = {"one attribute", "only pending", "a period"}


@pytest.mark.few(1)
@live_or_not
@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(each, marks=pytest.mark.thorough) if each in THOROUGH_DUPLICATES else each
        for each in CONFIGURATIONS
    ],
)
def test_the_query_in_the_error_shows_the_duplicates(
    database: Database, make: Any, engine: sa.Engine, configuration: str, *, live: bool
) -> None:
    """When all but one of each are deleted, the migration succeeds."""
    unique, expected = CONFIGURATIONS[configuration]
    project = make(queue(None))
    insert(engine, *ROWS)
    revise(project, queue(unique), live=live)
    query = refused(project)
    assert duplicates(engine, query) == expected
    assert invalid(engine) == 0
    with engine.begin() as connection:
        for _, *rest in expected:
            connection.exec_driver_sql(f"DELETE FROM orders WHERE id IN ({', '.join(map(str, rest))})")
    project.upgrade()
    project.check()
    assert duplicates(engine, query) == []
    assert in_any_order(dump(database)) == in_any_order(wanted(queue(unique), database))


@live_or_not
def test_duplicates_are_found_before_anything_waits_for_a_lock(
    database: Database, make: Any, engine: sa.Engine, *, live: bool
) -> None:
    """An open transaction that has written to the table blocks the creation of an index."""
    project = make(queue(None))
    insert(engine, ("a", "x"), ("a", "x"))
    revise(project, queue(Unique("article")), live=live)
    set_for_all(database, "SET lock_timeout = '3s'")
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO orders (article) VALUES ('b')")
        refused(project)


@live_or_not
@pytest.mark.parametrize("change", ["new", "replaced"])
def test_duplicates_that_appear_while_the_index_is_built(
    make: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, change: str, *, live: bool
) -> None:
    """The same error, and no invalid index remains, which would refuse new jobs."""
    project = make(queue(None if change == "new" else Unique("kind")))
    insert(engine, ("a", "x"), ("a", "y"))
    revise(project, queue(Unique("article")), live=live)
    with monkeypatch.context() as patch:
        patch.setattr(operations_on_rows, "duplicates_check", lambda _: "DO 'BEGIN END'")
        query = refused(project)
    assert duplicates(engine, query) == [[1, 2]]
    assert invalid(engine) == 0
    insert(engine, ("c", "z"))
    execute(engine, "DELETE FROM orders WHERE id = 2")
    project.upgrade()
    project.check()


@live_or_not
def test_a_replaced_index_remains_until_the_new_one_is_complete(
    database: Database, make: Any, engine: sa.Engine, *, live: bool
) -> None:
    model = queue(Unique("article", "kind"))
    project = make(model)
    before = dump(database)
    insert(engine, ("a", "x"), ("a", "y"))
    revise(project, queue(Unique("article")), live=live)
    refused(project)
    assert dump(database) == before
    execute(engine, "DELETE FROM orders WHERE id = 2")
    if live:
        upgrade_with_interruption(project)
    else:
        project.upgrade()
    assert dump(database) == wanted(queue(Unique("article")), database)
    project.downgrade()
    assert dump(database) == before


def test_an_interrupted_live_migration_is_run_again(database: Database, make: Any, engine: sa.Engine) -> None:
    """An invalid index, left by a lost connection, is dropped."""
    project = make(queue(None))
    insert(engine, ("a", "x"))
    revise(project, queue(Unique("article", within=HOUR)), live=True)
    execute(
        engine,
        f"CREATE UNIQUE INDEX {NAME} ON orders (id)",
        f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{NAME}'::regclass",
    )
    upgrade_with_interruption(project)
    assert dump(database) == wanted(queue(Unique("article", within=HOUR)), database)


def test_an_index_beside_a_live_table_is_created_again(make: Any) -> None:
    """An interrupted migration has committed it with the first step of the other table."""

    def model(config: QueueConfig | None, unique: Unique | None) -> type[Any]:
        first = order(config)
        order(QueueConfig(unique=unique), first.__bases__[-1], __tablename__="other")
        return first

    project = make(model(None, None))
    revise(project, model(QueueConfig(), Unique("article")), live=True)
    project.edit("existing_rows=...", "existing_rows='completed'")
    upgrade_with_interruption(project)


@live_or_not
def test_a_downgrade_that_restores_an_index_finds_duplicates(
    database: Database, make: Any, engine: sa.Engine, *, live: bool
) -> None:
    project = make(queue(Unique("kind", within=HOUR, nulls_distinct=False)))
    before = dump(database)
    revise(project, queue(None), live=live)
    project.upgrade()
    project.check()
    insert(engine, ("a", None, "pending", f"{MONDAY}:00+00"), ("b", None, "pending", f"{MONDAY}:01+00"))
    with pytest.raises(CommandError, match=NAME) as error:
        project.downgrade()
    assert duplicates(engine, str(error.value).partition("\n\n")[2]) == [[1, 2]]
    execute(engine, "DELETE FROM orders WHERE id = 2")
    project.downgrade()
    assert dump(database) == before


@live_or_not
def test_an_attribute_whose_column_is_new(database: Database, make: Any, engine: sa.Engine, *, live: bool) -> None:
    """The search for duplicates needs the column."""
    project = make(order(QueueConfig()))
    insert(engine, ("a",), ("b",))
    before = dump(database)
    model = order(
        QueueConfig(unique=Unique("kind")),
        kind=mapped_column(sa.Text, nullable=False, server_default="x"),
        other=mapped_column(sa.Text),
    )
    revise(project, model, live=live)
    assert "SELECT kind, count(*)" in refused(project)
    execute(engine, "DELETE FROM orders WHERE id = 2")
    if live:
        upgrade_with_interruption(project)
    else:
        project.upgrade()
    project.check()
    assert in_any_order(dump(database)) == in_any_order(wanted(model, database))
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(before)


@live_or_not
def test_existing_rows_that_become_jobs(make: Any, engine: sa.Engine, *, live: bool) -> None:
    project = make(order(None, kind=mapped_column("Kind", sa.Text)))
    insert(engine, ("a", "x"), ("a", "y"))
    revise(project, queue(Unique("article")), live=live)
    project.edit("existing_rows=...", "existing_rows='pending'")
    refused(project)
    execute(engine, "DELETE FROM orders WHERE id = 2")
    project.upgrade()
    project.check()


def test_a_composite_key_without_a_status(make: Any, engine: sa.Engine) -> None:
    def model(unique: Unique | None) -> type[Any]:
        class Base(DeclarativeBase):
            pass

        body = {
            "__tablename__": "orders",
            "__queue__": QueueConfig(strategy="delete_returning", rows_are_messages=True, unique=unique),
            "shop": mapped_column(sa.Text, primary_key=True),
            "number": mapped_column(sa.Integer, primary_key=True, autoincrement=False),
            "article": mapped_column(sa.Text, nullable=False),
        }
        return type("Order", (QueueMixin, Base), body)

    project = make(model(None))
    execute(engine, "INSERT INTO orders (shop, number, article) VALUES ('s', 2, 'a'), ('s', 1, 'a'), ('t', 1, 'b')")
    revise(project, model(Unique("article", nulls_distinct=False)), live=False)
    with engine.connect() as connection:
        (found,) = connection.exec_driver_sql(refused(project)).all()
    assert (found.article, found.count) == ("a", 2)
    assert found.array_agg == '{"(s,1)","(s,2)"}' or [*map(tuple, found.array_agg)] == [("s", "1"), ("s", "2")]


def test_columns_with_the_names_of_variables(make: Any, engine: sa.Engine) -> None:
    """PL/pgSQL has a variable FOUND, and a statement may not name a column of the same name without saying which."""
    project = make(order(QueueConfig(), found=mapped_column(sa.Text)))
    execute(engine, "INSERT INTO orders (article, found) VALUES ('a', 'x'), ('b', 'x')")
    revise(project, order(QueueConfig(unique=Unique("found")), found=mapped_column(sa.Text)), live=False)
    assert duplicates(engine, refused(project)) == [[1, 2]]


@live_or_not
def test_a_script_refuses_duplicates(database: Database, make: Any, engine: sa.Engine, *, live: bool) -> None:
    """Its statements are executed one by one, as psql does."""
    project = make(queue(Unique("kind", "article")))
    before = project.current()
    insert(engine, ("a", "x"), ("a", "y"))
    revise(project, queue(Unique("article", within=HOUR)), live=live)
    script = project.script(f"{before}:head")
    with database.connect() as connection:
        execute(engine, "UPDATE orders SET created_at = '2026-01-05'")
        with pytest.raises(psycopg.errors.UniqueViolation) as error:
            run_script(connection, script)
        connection.execute("ROLLBACK")
        query = error.value.diag.message_primary
        assert query is not None
        assert duplicates(engine, query.partition("\n\n")[2]) == [[1, 2]]
        connection.execute("DELETE FROM orders WHERE id = 2")
        run_script(connection, script)
    project.check()


def run_script(connection: psycopg.Connection[Any], script: str) -> None:
    for statement in re.split(r";\n\n", script):
        if statement.strip():
            connection.execute(statement)  # type: ignore[call-overload] # the text of a script is no literal


@live_or_not
def test_the_error_names_a_translated_schema(
    database: Database, make: Any, engine: sa.Engine, tmp_path: Any, *, live: bool
) -> None:
    def model(unique: Unique | None, schema: str) -> type[Any]:
        return order(QueueConfig(unique=unique), __table_args__={"schema": schema})

    execute(engine, 'CREATE SCHEMA "Tenant 1"')
    before, after = model(None, "Tenant 1"), model(Unique("article"), "Tenant 1")
    before.metadata.create_all(engine)
    execute(engine, """INSERT INTO "Tenant 1".orders (article) VALUES ('a'), ('a')""")
    project = Project(
        directory=tmp_path,
        database=database,
        metadata=after.metadata,
        options={"include_schemas": True},
    )
    project.revise("unique", **({"live": "Tenant 1.orders"} if live else {}))
    project.edit("schema='Tenant 1'", "schema='tenant'")
    project.execution_options = {"schema_translate_map": {"tenant": "Tenant 1"}}
    with pytest.raises(CommandError, match='"Tenant 1".orders: the unique index') as error:
        project.upgrade()
    query = str(error.value).partition("\n\n")[2]
    assert duplicates(engine, query) == [[1, 2]]
    execute(engine, 'DELETE FROM "Tenant 1".orders WHERE id = 2')
    project.upgrade()
    project.execution_options = {}
    project.check()
