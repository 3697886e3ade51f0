"""Migrations create, replace and drop the functions that statements call, and all that flow control needs."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import mapped_column

from sqlaqueue import ConcurrencyLimit, FairShare, InOrder, QueueConfig, RateLimit
from tests.alembic.conftest import (
    Project,
    changed,
    dump,
    enqueue,
    execute,
    in_any_order,
    new_base,
    order,
    run_all,
    wanted,
)
from tests.alembic.test_environments import psql
from tests.mapping.test_claim_functions import ARGUMENTS, attach_function, count, name_of
from tests.servers import Database

NAME = "sqlaqueue_limit_orders"
OTHER_BODY = "BEGIN\n  RETURN 100 % 7;\nEND\n"


def limited(**changes: Any) -> type[Any]:
    model = order(QueueConfig())
    attach_function(sa.inspect(model).local_table, **changes)
    return model


def result(engine: sa.Engine, model: type[Any]) -> Any:
    with engine.connect() as connection:
        return connection.scalar(count(model.__table__, 0))


def test_a_new_queue_has_it(database: Database, make: Any, engine: sa.Engine) -> None:
    model = limited()
    empty = dump(database)
    project: Project = make(model)
    project.check()
    assert dump(database) == wanted(model, database)
    assert result(engine, model) == 0
    project.downgrade()
    assert dump(database) == empty


def test_the_migration_contains_it(database: Database, tmp_path: Path) -> None:
    """And not what the model says later."""
    text = Project(directory=tmp_path, database=database, metadata=limited().metadata).revise()
    assert "op.create_queue_function(\n        'sqlaqueue_limit_orders',\n        (\n            'BEGIN\\n'" in text
    assert f"arguments='{ARGUMENTS}',\n        returns='integer',\n        tables={{'jobs': 'orders'}}," in text
    assert f"op.drop_queue_function('{NAME}', arguments='{ARGUMENTS}')" in text


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"body": OTHER_BODY, "tables": {}},
        {"comment": "sqlaqueue, version 2"},
        {"comment": None},
        {"definer": True},
        {"arguments": "sqlaqueue_key bigint"},
        {"arguments": ARGUMENTS.replace("_key", "_other"), "body": OTHER_BODY, "tables": {}},
        {"returns": "bigint", "arguments": ""},
        {"name": "sqlaqueue_limit_orders_again"},
    ],
)
def test_a_changed_function_is_replaced(database: Database, make: Any, engine: sa.Engine, changes: Any) -> None:
    model = limited(**changes)
    text = changed(make(limited()), model)
    assert text.count("op.create_queue_function(") == 2
    assert "trigger" not in text
    assert dump(database) == wanted(model, database)


def test_another_result_under_the_same_name_is_no_silent_difference(make: Any) -> None:
    """PostgreSQL refuses to replace it, and says that it has to be dropped first: a new result needs a new name."""
    project: Project = make(limited())
    project.revise(model=limited(returns="bigint"))
    with pytest.raises(ProgrammingError, match="cannot change return type"):
        project.upgrade()


def test_it_is_added_and_removed(database: Database, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    project: Project = make(order(QueueConfig()))
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        added = changed(project, limited())
        removed = changed(project, order(QueueConfig()))
    assert dump(database) == wanted(order(QueueConfig()), database)
    for text in (added, removed):
        assert re.findall(r"op\.(\w+)\(", text) in [
            ["create_queue_function", "drop_queue_function"],
            ["drop_queue_function", "create_queue_function"],
        ]
    assert f"Detected added function '{NAME}'" in caplog.text
    assert f"Detected removed function '{NAME}'" in caplog.text


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"DROP FUNCTION {NAME}", "added"),
        (f"COMMENT ON FUNCTION {NAME} IS NULL", "changed"),
        (f"COMMENT ON FUNCTION {NAME} IS 'it''s 100%% mine'", "changed"),
        (f"ALTER FUNCTION {NAME} SET search_path = public", "changed"),
        (f"ALTER FUNCTION {NAME} SET enable_seqscan = on", "changed"),
        (f"ALTER FUNCTION {NAME} RESET plan_cache_mode", "changed"),
        (f"ALTER FUNCTION {NAME} STABLE", "changed"),
        (f"ALTER FUNCTION {NAME} SECURITY DEFINER", "changed"),
        (f"CREATE OR REPLACE FUNCTION {NAME}({ARGUMENTS}) RETURNS integer LANGUAGE sql RETURN 100 %% 7", "changed"),
    ],
)
def test_changes_by_hand_are_repaired(
    database: Database, make: Any, engine: sa.Engine, change: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    project: Project = make(limited())
    execute(engine, change)
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        changed(project)
    assert f"Detected {said} function '{NAME}'" in caplog.text
    assert dump(database) == wanted(limited(), database)


def test_the_downgrade_restores_a_removed_function_that_was_changed_by_hand(
    database: Database, make: Any, engine: sa.Engine
) -> None:
    project: Project = make(limited())
    execute(engine, f"ALTER FUNCTION {NAME} STABLE PARALLEL SAFE COST 7")
    text = changed(project, order(QueueConfig()))
    assert "COST 7" in text


def test_a_granted_privilege_survives_a_replacement_and_its_downgrade(make: Any, engine: sa.Engine) -> None:
    project: Project = make(limited())
    execute(engine, f"REVOKE EXECUTE ON FUNCTION {NAME} FROM PUBLIC")
    changed(project, limited(body=OTHER_BODY, tables={}))


def test_functions_of_others_stay(database: Database, make: Any, engine: sa.Engine) -> None:
    """Without the comment, or without the prefix, a function is not the library's."""
    project: Project = make(limited())
    execute(
        engine,
        "CREATE FUNCTION sqlaqueue_report() RETURNS text LANGUAGE sql RETURN 'mine'",
        f"CREATE FUNCTION {NAME}(text) RETURNS text LANGUAGE sql RETURN 'mine'",
        "COMMENT ON FUNCTION sqlaqueue_report() IS 'sqlaqueue, version 1, as we use it'",
        "CREATE FUNCTION limit_orders() RETURNS text LANGUAGE sql RETURN 'mine'",
        "COMMENT ON FUNCTION limit_orders() IS 'sqlaqueue, version 1'",
        "CREATE PROCEDURE sqlaqueue_procedure() LANGUAGE sql AS 'SELECT 1'",
        "COMMENT ON PROCEDURE sqlaqueue_procedure() IS 'sqlaqueue, version 1'",
        "CREATE AGGREGATE sqlaqueue_sum(integer) (sfunc = int4pl, stype = integer)",
        "COMMENT ON AGGREGATE sqlaqueue_sum(integer) IS 'sqlaqueue, version 1'",
    )
    project.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("theirs", ["orders_archive", "big_orders", "o" * 60, "orders" + "s" * 42])
def test_functions_of_tables_that_the_filters_leave_out_stay(
    database: Database, make: Any, engine: sa.Engine, theirs: str
) -> None:
    """Two applications share a database, and each has its own migrations."""
    other = order(QueueConfig(), __tablename__=theirs).__table__
    attach_function(other)
    other.metadata.create_all(engine)
    tables = limited().metadata.tables
    project: Project = make(limited(), include_name=lambda name, kind, _: kind != "table" or name in tables)
    removed = changed(project, order(QueueConfig()))
    assert NAME in removed
    with engine.connect() as connection:
        assert connection.scalar(count(other, 0)) == 0
    # Once it is in the models, its function is found, and removed with it.
    project.options = {}
    text = project.revise(model=order(QueueConfig()))
    assert f"'{name_of(other)}'" in text.partition("def downgrade")[0]
    project.upgrade()
    project.check()


def test_functions_of_models_that_the_filters_leave_out_stay(make: Any) -> None:
    """Even if their names do not contain that of the table."""
    project: Project = make(limited(name="sqlaqueue_limit_everything"))
    project.options = {"include_object": lambda _, name, *__: name != "orders"}
    project.check()


def test_a_script_makes_the_same_schema(database: Database, tmp_path: Path, engine: sa.Engine) -> None:
    project = Project(directory=tmp_path, database=database, metadata=limited().metadata)
    # As in the env.py of Alembic's templates; otherwise scripts have percent signs doubled.
    project.options = {"dialect_opts": {"paramstyle": "named"}}
    empty = dump(database)
    project.revise()
    execute(engine, "DROP TABLE IF EXISTS alembic_version")
    project.metadata = limited(body=OTHER_BODY, comment="sqlaqueue, version 2").metadata
    psql(database, project.script())
    first = project.current()
    text = project.revise()
    assert text.count("op.create_queue_function(") == 2
    psql(database, project.script(f"{first}:head"))
    project.check()
    assert result(engine, limited()) == 2
    psql(database, project.script(f"head:{first}", down=True))
    assert dump(database) == wanted(limited(), database)
    psql(database, project.script(f"{first}:base", down=True))
    assert dump(database) == empty


@pytest.mark.parametrize("schema", ["shop", 'the "shop"'])
def test_another_schema(database: Database, make: Any, engine: sa.Engine, schema: str) -> None:
    model = order(QueueConfig(), new_base(metadata=sa.MetaData(schema=schema)), __tablename__='the "job"')
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(schema))
    attach_function(model.__table__)
    project: Project = make(model, include_schemas=True)
    project.check()
    quoted = engine.dialect.identifier_preparer.quote(schema)
    name = engine.dialect.identifier_preparer.quote(name_of(model.__table__))
    execute(engine, f"COMMENT ON FUNCTION {quoted}.{name} IS 'sqlaqueue, version 0'")
    changed(project)
    with engine.connect() as connection:
        assert connection.scalar(count(model.__table__, 0)) == 0


def test_a_translated_schema(database: Database, make: Any, engine: sa.Engine) -> None:
    """Migrations are written with the search path, and applied to each schema."""
    model = limited()
    project: Project = make(order(QueueConfig()))
    changed(project, model)
    with database.connect() as connection:
        connection.execute('CREATE SCHEMA "Tenant\'s"')
        connection.execute("DROP TABLE alembic_version")
    empty = dump(database)
    project.execution_options = {"schema_translate_map": {None: "Tenant's"}}
    # Otherwise Alembic writes its version to the translated schema, and looks for it in the default one.
    project.options = {"version_table_schema": "public"}
    project.upgrade()
    assert result(engine.execution_options(**project.execution_options), model) == 0
    project.downgrade("base")
    assert dump(database) == empty
    # A table that create_all() made in a translated schema names that schema in the body.
    model.metadata.drop_all(engine)
    with engine.begin() as connection:
        model.metadata.create_all(connection.execution_options(schema_translate_map={None: "public"}))
        assert "public.orders" in connection.scalar(sa.text(f"SELECT prosrc FROM pg_proc WHERE proname = '{NAME}'"))
    command.stamp(project.config(), "head")
    project.execution_options, project.options = {}, {}
    project.check()


# -- flow control: autogenerate adds, changes and removes its indexes, functions, triggers and the table of rates ------


def orders(**config: Any) -> type[Any]:
    """Map a queue with a column whose name must be quoted."""
    return order(QueueConfig(**config), kind=mapped_column("Kind", sa.Text))


LIMIT, RATE = ConcurrencyLimit(2, per="article"), RateLimit(10, every=1, per="kind")
EVERYTHING: dict[str, Any] = {
    "flow_control": [
        LIMIT,
        ConcurrencyLimit(5),
        ConcurrencyLimit(3, per=("article", "kind")),
        RATE,
        RateLimit(100, every=60),
        InOrder("kind", on_failure="cancel"),
        FairShare("article", "kind"),
    ],
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything": ({}, EVERYTHING),
    "nothing": (EVERYTHING, {}),
    "a limit": ({"flow_control": [LIMIT]}, {"flow_control": [LIMIT, ConcurrencyLimit(1)]}),
    "another key": ({"flow_control": [LIMIT]}, {"flow_control": [ConcurrencyLimit(2, per="kind")]}),
    "a rate": ({"flow_control": [LIMIT]}, {"flow_control": [LIMIT, RATE]}),
    "another order": (
        {"flow_control": [InOrder("kind")]},
        {"flow_control": [InOrder("kind", by="article", on_failure="continue")]},
    ),
    "turns": ({"flow_control": [LIMIT]}, {"flow_control": [LIMIT, FairShare("article")]}),
}
for held in ("batch_select", "delete_returning"):
    CHANGES |= {
        f"everything, {held}": ({"strategy": held}, EVERYTHING | {"strategy": held}),
        f"nothing, {held}": (EVERYTHING | {"strategy": held}, {"strategy": held}),
    }
THOROUGH = {"a limit", "turns", "another key", "nothing, batch_select", "everything, delete_returning"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change", [pytest.param(each, marks=pytest.mark.thorough) if each in THOROUGH else each for each in CHANGES]
)
def test_a_change_of_flow_control(database: Database, make: Any, change: str) -> None:
    before, after = (orders(**each) for each in CHANGES[change])
    changed(make(before), after)
    assert in_any_order(dump(database)) == in_any_order(wanted(after, database))


def test_numbers_are_no_difference(make: Any) -> None:
    project: Project = make(orders(flow_control=[LIMIT, RATE]))
    project.metadata = orders(
        flow_control=[ConcurrencyLimit(7, per="article"), RateLimit(20, every=2, per="kind")]
    ).metadata
    project.check()


def test_a_queue_is_served_while_flow_control_is_added_and_removed(make: Any, engine: sa.Engine) -> None:
    plain, with_limit = orders(), orders(flow_control=[ConcurrencyLimit(1, per="article"), InOrder("kind")])
    project: Project = make(plain)
    enqueue(engine, plain, "a", "a", "b", kind="x")
    project.revise(model=with_limit)
    project.upgrade()
    # A process of the version before claims as before, and the new one obeys.
    assert run_all(engine, with_limit) == ["a"]
    assert run_all(engine, plain) == ["a", "b"]
    enqueue(engine, plain, "c", kind="y")
    project.revise(model=plain)
    project.upgrade()
    assert run_all(engine, plain) == ["c"]
