"""Autogenerate and the tables of schedules: everything in them is compared, and they are kept while they have rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, mapped_column, sessionmaker

from sqlaqueue import QueueConfig, QueueMixin, Schedule, Scheduler
from tests.migrations.models import enqueue, order, run_all
from tests.migrations.project import Project, changed, dump, execute, in_any_order, wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.servers import Database

FUNCTION = "sqlaqueue_schedule_changed"
INSERT = "sqlaqueue_schedule_insert"
UPDATE = "sqlaqueue_schedule_update_"
EVERYTHING = (
    "CREATE TABLE public.sqlaqueue_schedule",
    "CREATE TABLE public.sqlaqueue_tick",
    f"CREATE FUNCTION public.{FUNCTION}",
    f"CREATE TRIGGER {INSERT}",
    f"CREATE TRIGGER {UPDATE}",
    "CONSTRAINT ck_sqlaqueue_schedule_cron_or_every",
    "CONSTRAINT ck_sqlaqueue_schedule_every",
    "CREATE INDEX ix_sqlaqueue_tick_job",
)
ADD = "INSERT INTO {}sqlaqueue_schedule (name, queue, every) VALUES ('at run time', 'orders', '1 hour')"


def scheduled(**attributes: Any) -> type[Any]:
    """Map ``orders`` as a queue, and declare a schedule for it."""
    model = order(QueueConfig(), **attributes)
    Schedule("nightly", model, every=60, values={"article": "report"})
    return model


def without_schedules() -> type[Any]:
    """Return the same queue as an ``env.py`` has it that does not import the module with the schedules."""
    return order(QueueConfig())


def in_schema(schema: str | None, *, schedules: bool = True) -> type[Any]:
    model = order(QueueConfig(), __table_args__={"schema": schema})
    if schedules:
        Schedule("nightly", model, every=60, values={"article": "report"})
    return model


def in_schemas(with_schedules: Sequence[str | None]) -> type[Any]:
    """Map a queue in three schemas, and declare schedules in some of them."""

    class Base(DeclarativeBase):
        pass

    for number, schema in enumerate((None, "One", "two")):
        body = {
            "__tablename__": "job",
            "__table_args__": {"schema": schema},
            "__queue__": QueueConfig(),
            "id": mapped_column(sa.Integer, primary_key=True),
        }
        model = type(f"Job{number}", (QueueMixin, Base), body)
        if schema in with_schedules:
            Schedule("nightly", model, every=60)
    return Base


def administer(database: Database, *statements: str) -> None:
    with database.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- created and dropped ---------------------------------------------------------------------------------------------


def test_everything_is_created_and_dropped(database: Database, tmp_path: Path) -> None:
    model = scheduled()
    before = dump(database)
    project = Project(directory=tmp_path, database=database, metadata=model.metadata)
    project.revise()
    project.upgrade()
    project.check()
    created = dump(database)
    assert in_any_order(created) == in_any_order(wanted(model, database))
    assert [each for each in EVERYTHING if each not in created] == []
    project.downgrade()
    administer(database, "DROP TABLE alembic_version")
    assert dump(database) == before
    # The same by the scripts for an administrator.
    administer(database, project.script())
    assert dump(database) == created
    project.check()
    administer(database, project.script("head:base", down=True))
    assert dump(database) == before


def test_the_first_schedule_of_a_queue(database: Database, make: Any, engine: sa.Engine) -> None:
    """The migration adds the tables of schedules, and leaves the queue as it is."""
    model = without_schedules()
    project = make(model)
    Scheduler(sessionmaker(engine), [model])
    text = changed(project, model)
    assert "'orders'" not in text
    assert in_any_order(dump(database)) == in_any_order(wanted(model, database))


def test_tables_made_by_create_all_are_no_difference(database: Database, engine: sa.Engine, tmp_path: Path) -> None:
    model = scheduled()
    model.metadata.create_all(engine)
    Project(directory=tmp_path, database=database, metadata=model.metadata).check()


def test_a_naming_convention(database: Database, tmp_path: Path) -> None:
    """The names are those of the library, as migrations and other programs look for them."""

    class Base(DeclarativeBase):
        metadata = sa.MetaData(
            naming_convention={
                "ck": "ck_%(table_name)s_%(constraint_name)s",
                "ix": "ix_%(table_name)s_%(constraint_name)s",
            }
        )

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        id = mapped_column(sa.Integer, primary_key=True)

    Schedule("nightly", Job, every=60)
    project = Project(directory=tmp_path, database=database, metadata=Base.metadata)
    project.revise()
    project.upgrade()
    project.check()
    assert [each for each in EVERYTHING if each not in dump(database)] == []


def test_settings_of_the_session(database: Database, tmp_path: Path, engine: sa.Engine) -> None:
    """PostgreSQL prints moments and intervals in another form, in which they are compared and restored."""
    model = scheduled()
    project = Project(directory=tmp_path, database=database, metadata=model.metadata)
    project.revise()
    project.upgrade()
    good = dump(database)
    administer(
        database,
        f"ALTER DATABASE {database.name} SET TimeZone = 'Asia/Kathmandu'",
        f"ALTER DATABASE {database.name} SET IntervalStyle = 'iso_8601'",
        f"ALTER DATABASE {database.name} SET DateStyle = 'German'",
    )
    engine.dispose()
    project.check()
    # The tables and their defaults are written as they are printed, and created from that by the downgrade.
    changed(project, without_schedules())
    project.downgrade()
    administer(
        database,
        f"ALTER DATABASE {database.name} RESET ALL",
    )
    assert in_any_order(dump(database)) == in_any_order(good)


def test_one_migration_for_all_tenants(database: Database, tmp_path: Path) -> None:
    """It is written for the search path of one tenant, and run with ``schema_translate_map`` for the other."""
    administer(database, "CREATE SCHEMA one", 'CREATE SCHEMA "Tenant\'s"')
    before = dump(database)
    model = scheduled()
    project = Project(directory=tmp_path, database=database, metadata=model.metadata)
    project.options = {"version_table_schema": "public"}
    administer(database, f"ALTER DATABASE {database.name} SET search_path TO one, public")
    project.revise()
    project.upgrade()
    project.check()
    project.downgrade()
    administer(database, f"ALTER DATABASE {database.name} RESET search_path")
    project.execution_options = {"schema_translate_map": {None: "Tenant's"}}
    project.upgrade()
    assert f'CREATE TRIGGER {INSERT} AFTER INSERT ON "Tenant\'s".sqlaqueue_schedule' in dump(database)
    administer(database, f'ALTER DATABASE {database.name} SET search_path TO "Tenant\'s", public')
    project.execution_options = {}
    project.check()
    administer(database, f"ALTER DATABASE {database.name} RESET search_path")
    project.execution_options = {"schema_translate_map": {None: "Tenant's"}}
    project.downgrade()
    administer(database, "DROP TABLE alembic_version")
    assert dump(database) == before


# -- changes by hand ---------------------------------------------------------------------------------------------


SCHEDULE = "ALTER TABLE sqlaqueue_schedule"
CHANGES = [
    f"DROP TRIGGER {INSERT} ON sqlaqueue_schedule",
    f"{SCHEDULE} DISABLE TRIGGER {INSERT}",
    f"""CREATE OR REPLACE TRIGGER {{update}} AFTER UPDATE ON sqlaqueue_schedule FOR EACH ROW
        WHEN (OLD.queue <> NEW.queue) EXECUTE FUNCTION {FUNCTION}()""",
    f"DROP FUNCTION {FUNCTION} CASCADE",
    f"""CREATE OR REPLACE FUNCTION {FUNCTION}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'""",
    "DROP INDEX ix_sqlaqueue_tick_job",
    "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_sqlaqueue_tick_job'::regclass",
    f"{SCHEDULE} DROP CONSTRAINT ck_sqlaqueue_schedule_every",
    f"""{SCHEDULE} DROP CONSTRAINT ck_sqlaqueue_schedule_every,
        ADD CONSTRAINT ck_sqlaqueue_schedule_every CHECK (every >= interval '1 hour')""",
    f"{SCHEDULE} ADD CONSTRAINT ck_sqlaqueue_schedule_of_an_older_version CHECK (catch_up < 9)",
    f"{SCHEDULE} ALTER COLUMN grace DROP DEFAULT",
    f"{SCHEDULE} ALTER COLUMN grace SET DEFAULT '1 day 01:00:00'",
]


def test_changes_by_hand_are_repaired(database: Database, make: Any, engine: sa.Engine) -> None:
    """Each of them is found alone; one project for all takes a fraction of the time."""
    project = make(scheduled())
    with engine.connect() as connection:
        query = sa.text("SELECT tgname FROM pg_trigger WHERE starts_with(tgname, :prefix)")
        update = connection.scalar(query, {"prefix": UPDATE})
    good = dump(database)
    for change in CHANGES:
        execute(engine, change.format(update=update))
        project.revise()
        project.upgrade()
        assert in_any_order(dump(database)) == in_any_order(good), change
    project.check()


@pytest.mark.thorough
@pytest.mark.parametrize("change", [each for each in CHANGES if "indisvalid" not in each])
def test_a_repair_can_be_undone(make: Any, engine: sa.Engine, change: str) -> None:
    project = make(scheduled())
    with engine.connect() as connection:
        query = sa.text("SELECT tgname FROM pg_trigger WHERE starts_with(tgname, :prefix)")
        update = connection.scalar(query, {"prefix": UPDATE})
    execute(engine, change.format(update=update))
    changed(project)


def test_what_others_added_is_left_alone(make: Any, engine: sa.Engine) -> None:
    project = make(scheduled())
    execute(
        engine,
        f"{SCHEDULE} ADD CONSTRAINT theirs CHECK (timezone <> 'Mars')",
        "CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER mine AFTER INSERT ON sqlaqueue_schedule EXECUTE FUNCTION mine()",
    )
    project.check()


# -- env.py does not import the schedules --------------------------------------------------------------------------


def test_tables_with_schedules_are_kept(
    database: Database, make: Any, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    project = make(scheduled())
    execute(engine, ADD.format(""))
    project.metadata = without_schedules().metadata
    before = dump(database)
    caplog.clear()
    assert "op." not in project.revise().partition("def upgrade")[2]
    (warning,) = warnings(caplog)
    assert "sqlaqueue_schedule, sqlaqueue_tick" in warning
    assert "Import the module that declares the schedules in env.py" in warning
    assert "delete the rows of sqlaqueue_schedule" in warning
    project.upgrade()
    project.check()
    assert dump(database) == before
    # Ticks alone are no reason: they are of no use without their schedules.
    execute(
        engine,
        "DELETE FROM sqlaqueue_schedule",
        "INSERT INTO sqlaqueue_tick (schedule, tick, queue) VALUES ('nightly', now(), 'orders')",
    )
    caplog.clear()
    changed(project)
    assert warnings(caplog) == []
    assert "sqlaqueue_schedule" not in dump(database)
    assert "sqlaqueue_tick" not in dump(database)
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(before)


def test_their_function_is_kept_without_triggers(database: Database, make: Any, engine: sa.Engine) -> None:
    project = make(scheduled())
    execute(engine, ADD.format(""), f"{SCHEDULE} DISABLE TRIGGER ALL", f"DROP TRIGGER {INSERT} ON sqlaqueue_schedule")
    execute(engine, *_dropped_triggers(engine))
    project.metadata = without_schedules().metadata
    project.check()
    assert FUNCTION in dump(database)


def _dropped_triggers(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        query = sa.text("SELECT tgname FROM pg_trigger WHERE tgrelid = 'sqlaqueue_schedule'::regclass")
        return [f"DROP TRIGGER {name} ON sqlaqueue_schedule" for name in connection.scalars(query)]


def test_each_schema_is_judged_by_its_own_rows(
    database: Database, engine: sa.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    administer(database, 'CREATE SCHEMA "One"', "CREATE SCHEMA two")
    metadata = in_schemas([None, "One", "two"]).metadata
    project = Project(directory=tmp_path, database=database, metadata=metadata, options={"include_schemas": True})
    project.revise()
    project.upgrade()
    project.check()
    execute(engine, ADD.format('"One".'), ADD.format("two."))
    project.metadata = in_schemas(["two"]).metadata
    changed(project)
    assert '"One".sqlaqueue_schedule' in dump(database)
    assert "public.sqlaqueue_schedule" not in dump(database)
    assert {each.partition(" are in no model")[0] for each in warnings(caplog)} == {
        "the tables One.sqlaqueue_schedule, One.sqlaqueue_tick"
    }


@pytest.mark.parametrize("schema", [None, "orders only"], ids=["dropped", "in another schema"])
def test_a_queue_that_goes_leaves_its_schedules(
    database: Database, engine: sa.Engine, make: Any, schema: str | None
) -> None:
    """Everything else of the queue is dropped, and in another schema created, as it is without schedules."""
    project = make(scheduled(), include_schemas=True)
    execute(engine, ADD.format(""))
    administer(database, 'CREATE SCHEMA "orders only"')
    model: Any = type("Empty", (), {"metadata": sa.MetaData()}) if schema is None else in_schema(schema)
    changed(project, model)
    assert "public.orders" not in dump(database)
    assert "sqlaqueue_wake_orders" not in dump(database).replace('"orders only".sqlaqueue_wake_orders', "")
    assert [each for each in EVERYTHING if each not in dump(database)] == []
    if schema is not None:
        enqueue(engine, model, "1")
        assert run_all(engine, model) == ["1"]
    execute(engine, "DELETE FROM sqlaqueue_schedule")
    changed(project)
    assert "public." not in dump(database).replace("public.alembic_version", "")


def test_filters_of_env_py(database: Database, make: Callable[..., Project], engine: sa.Engine) -> None:
    """Ticks are kept as well if a filter leaves out the schedules, and without a warning if it leaves out both."""
    project = make(scheduled())
    execute(engine, ADD.format(""))
    project.metadata = without_schedules().metadata
    project.options = {"include_name": lambda name, *_: name != "sqlaqueue_schedule"}
    project.check()
    assert "sqlaqueue_tick" in dump(database)
