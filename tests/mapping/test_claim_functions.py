"""Functions that statements call are created and dropped with the table of their queue, and checked at the start."""

import logging
import pickle
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Mapped, Session, aliased, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.ddl import Function, attach, call, version_comment
from sqlaqueue.postgresql.start_checks import outdated_functions
from sqlaqueue.sql.types import is_name_of, object_name
from tests.mapping.conftest import TidyDatabase, created
from tests.models import execute, insert, new_base

ARGUMENTS = "sqlaqueue_key bigint, sqlaqueue_since timestamp with time zone"
BODY = """\
BEGIN
  -- At most 100% of the rows.
  RETURN (SELECT count(*) FROM {jobs} WHERE id % 2 = sqlaqueue_key AND sqlaqueue_since < pg_catalog.now());
END
"""


def name_of(table: sa.Table) -> str:
    return object_name("sqlaqueue_limit", table.name)


def attach_function(table: sa.Table, **changes: Any) -> Function:
    """Attach a function that counts rows of the table by the last bit of their keys."""
    values = {
        "name": name_of(table),
        "arguments": ARGUMENTS,
        "returns": "integer",
        "body": BODY,
        "tables": {"jobs": table},
        "comment": version_comment(1),
        **changes,
    }
    function = Function(table, **values)
    attach(table, function)
    return function


def count(table: sa.Table, key: Any) -> sa.Select[Any]:
    since = sa.func.to_timestamp(0)
    return sa.select(call(name_of(table), table, key, since, type_=sa.Integer()).label("count"))


NAME = 'a "job" of 100%'
MAPS: list[dict[str | None, str]] = [{}, {None: "o'ne"}, {None: "50% two"}]
PROPERTIES = sa.text("""
    SELECT provolatile::text, proconfig, obj_description(oid, 'pg_proc')
    FROM pg_proc WHERE proname LIKE 'sqlaqueue_limit%'
""")


def model(table: str = "job", schema: str | None = None, **changes: Any) -> type[Any]:
    class Job(QueueMixin, new_base()):
        __tablename__ = table
        __table_args__ = {"schema": schema}  # noqa: RUF012 - as SQLAlchemy reads it
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)

    attach_function(sa.inspect(Job).local_table, **changes)
    return Job


# -- DDL ---------------------------------------------------------------------------------------------------------------


def test_it_is_created_and_dropped_with_its_table(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model()
    with created(engine, job.metadata):
        insert(engine, job, [{"id": key} for key in (1, 3, 4)])
        assert execute(engine, count(job.__table__, 1)) == 2
        with engine.connect() as connection:
            settings = ["enable_seqscan=off", "plan_cache_mode=force_generic_plan"]
            assert [*connection.execute(PROPERTIES)] == [("v", settings, "sqlaqueue, version 1")]
        job.__table__.drop(engine)
        assert ("function", "sqlaqueue_limit_job") not in tidy.objects()
        job.__table__.create(engine)
        assert execute(engine, count(job.__table__, 1)) == 0
    assert tidy.objects() == tidy.empty


def test_another_body_replaces_it(tidy: TidyDatabase, engine: sa.Engine) -> None:
    """As an application does that calls create_all() only, after it dropped the table by hand."""
    job, other = model(), model(body="BEGIN RETURN 42; END", comment=None)
    job.metadata.create_all(engine)
    execute(engine, "DROP TABLE job")
    with created(engine, other.metadata):
        assert execute(engine, count(other.__table__, 1)) == 42
    assert tidy.objects() == tidy.empty


def test_the_function_of_another_signature_stays(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model()
    execute(engine, "CREATE FUNCTION sqlaqueue_limit_job() RETURNS text RETURN 'mine'")
    with created(engine, job.metadata):
        assert execute(engine, count(job.__table__, 1)) == 0
    with engine.begin() as connection:
        assert connection.scalar(sa.text("SELECT sqlaqueue_limit_job()")) == "mine"
        connection.exec_driver_sql("DROP FUNCTION sqlaqueue_limit_job()")
    assert tidy.objects() == tidy.empty


def test_pickled_metadata_creates_it(tidy: TidyDatabase, engine: sa.Engine) -> None:
    again: sa.MetaData = pickle.loads(pickle.dumps(model().metadata))  # noqa: S301 - pickled by this test
    with created(engine, again):
        assert execute(engine, count(again.tables["job"], 1)) == 0
    assert tidy.objects() == tidy.empty


def test_it_may_run_with_the_privileges_of_its_owner(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model(NAME, definer=True)
    with created(engine, job.metadata):
        assert execute(engine, count(job.__table__, 1)) == 0
        with engine.connect() as connection:
            owner = sa.text("SELECT prosecdef, proacl::text, proconfig[1] FROM pg_proc WHERE proname = :name")
            secured, privileges, path = connection.execute(owner, {"name": name_of(job.__table__)}).one()
            assert (secured, path) == (True, "search_path=pg_catalog, public, pg_temp")
            assert "{=X" not in privileges
    assert tidy.objects() == tidy.empty


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [None, 'the "sch:ema" of 50%'])
def test_names_that_must_be_quoted(tidy: TidyDatabase, engine: sa.Engine, schema: str | None) -> None:
    job = model(NAME, schema)
    with tidy.schemas(*filter(None, [schema])), created(engine, job.metadata):
        insert(engine, job, [{"id": 2}])
        assert execute(engine, count(job.__table__, 0)) == 1
    assert tidy.objects() == tidy.empty


def test_calls_under_schema_translate_map(tidy: TidyDatabase, engine: sa.Engine) -> None:
    """The statement is compiled once, and each schema has rows and a function of its own."""
    job = model(NAME)
    engines = [engine.execution_options(schema_translate_map=each) for each in MAPS]
    with tidy.schemas("o'ne", "50% two"):
        for number, translated in enumerate(engines):
            job.metadata.create_all(translated)
            insert(translated, job, number * 2)
        # The statement's own schema, of another table, must not decide where the function is.
        assert [execute(each, count(job.__table__, 0)) for each in engines] == [0, 1, 2]
        for translated in engines:
            job.metadata.drop_all(translated)
    assert tidy.objects() == tidy.empty


async def test_calls_with_asyncpg(tidy: TidyDatabase) -> None:
    job = model(NAME)
    engine = create_async_engine(
        tidy.database.url("asyncpg"), execution_options={"schema_translate_map": {None: "o'ne"}}
    )
    with tidy.schemas("o'ne"):
        async with engine.begin() as connection:
            await connection.run_sync(job.metadata.create_all)
            assert await connection.scalar(count(job.__table__, 0)) == 0
            await connection.run_sync(job.metadata.drop_all)
        await engine.dispose()
    assert tidy.objects() == tidy.empty


def test_a_call_for_each_row_of_an_alias(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model()
    with created(engine, job.metadata), Session(engine) as session:
        insert(engine, job, 3)
        other = aliased(job)
        limit = call("sqlaqueue_limit_job", job.__table__, other.id % 2, sa.func.to_timestamp(0), type_=sa.Integer())
        query = sa.select(other.id, limit.label("count")).where(limit > 1).order_by(other.id)
        assert [tuple(row) for row in session.execute(query)] == [(1, 2), (3, 2)]
        # As a subquery, whose columns replace those of the alias.
        again = sa.select(sa.func.sum(query.subquery().c.count))
        assert session.scalar(again) == 4
    assert tidy.objects() == tidy.empty


def test_calls_are_told_apart_by_the_cache_of_statements() -> None:
    table, elsewhere = (sa.Table("t", sa.MetaData(), schema=schema) for schema in (None, "s"))

    def key(name: str, of: sa.Table, *arguments: Any, type_: Any) -> Any:
        found = sa.select(call(name, of, *arguments, type_=type_))._generate_cache_key()
        assert found is not None
        return found.key

    first = key("f", table, 1, type_=sa.Integer())
    assert first == key("f", table, 2, type_=sa.Integer())
    others = [
        key("g", table, 1, type_=sa.Integer()),
        key("f", elsewhere, 1, type_=sa.Integer()),
        key("f", table, 1, 2, type_=sa.Integer()),
        key("f", table, 1, type_=sa.Text()),
    ]
    assert len({first, *others}) == 5
    assert str(call("f", elsewhere, sa.column("x"), type_=sa.Integer()) + 1) == "s.f(x) + :param_1"


# -- checks at the start -----------------------------------------------------------------------------------------------


def consumer(engine: sa.Engine, job: type[Any]) -> Consumer[Any]:
    return Consumer(job, lambda session, job: None, sessionmaker(engine))


@pytest.mark.parametrize("by_hand", ["", "CREATE FUNCTION {schema}{name}() RETURNS integer RETURN 1"])
@pytest.mark.parametrize("schema", [None, "o'ne"])
def test_a_missing_function_is_refused(tidy: TidyDatabase, engine: sa.Engine, schema: str | None, by_hand: str) -> None:
    """One of the same name and other arguments is not it."""
    job = model()
    translated = engine.execution_options(schema_translate_map={None: schema})
    prefix = f'"{schema}".' if schema else ""
    with tidy.schemas(*filter(None, [schema])), created(translated, job.metadata):
        assert consumer(translated, job).drain() == 0
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP FUNCTION {prefix}sqlaqueue_limit_job")
            if by_hand:
                connection.exec_driver_sql(by_hand.format(schema=prefix, name="sqlaqueue_limit_job"))
        with pytest.raises(DatabaseNotReadyError) as refused:
            consumer(translated, job).drain()
        assert f"Job needs: the function sqlaqueue_limit_job({ARGUMENTS}) of job; `alembic revision" in str(
            refused.value
        )
        if by_hand:
            execute(engine, f"DROP FUNCTION {prefix}sqlaqueue_limit_job()")
    assert tidy.objects() == tidy.empty


@pytest.mark.parametrize("version", [0, 3])
def test_another_version_is_reported(
    tidy: TidyDatabase, engine: sa.Engine, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Notifications have nothing to do with it: the Consumer listens as before."""
    job = model(comment="sqlaqueue, version 2")
    with created(engine, job.metadata):
        with Session(engine) as session:
            assert outdated_functions(session, spec_of(job)) is None
        execute(engine, f"COMMENT ON FUNCTION sqlaqueue_limit_job IS 'sqlaqueue, version {version}'")
        with caplog.at_level(logging.INFO, "sqlaqueue"), consumer(engine, job):
            pass
    (record,) = [each for each in caplog.records if getattr(each, "event", None) == "functions_outdated"]
    said = {
        0: "Job: the table job is not up to date: the function sqlaqueue_limit_job is of version 0, and version 2 is",
        3: "Job: the function sqlaqueue_limit_job is of version 3, and this process knows version 2",
    }
    assert record.getMessage().startswith(said[version])
    assert "by polling" not in record.getMessage()
    (started,) = [each for each in caplog.records if getattr(each, "event", None) == "consumer_started"]
    assert started.mode == "listening"  # type: ignore[attr-defined] # a field of the record
    assert tidy.objects() == tidy.empty


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("table", ["job", "j" * 38, "j" * 39, "j" * 40, "j" * 48, "j" * 63, "ä" * 30])
def test_the_table_of_a_name_is_recognized(table: str) -> None:
    for more in ([], ["again"], ["again", "and", "again" * 10]):
        assert is_name_of(object_name("sqlaqueue_limit", table, *more), "sqlaqueue_limit", table)
    assert not is_name_of(object_name("sqlaqueue_limit", f"{table[:20]}s"), "sqlaqueue_limit", table)
    assert not is_name_of(object_name("sqlaqueue_limit", f"{table[:5]}x12345678"), "sqlaqueue_limit", table)
    assert not is_name_of(object_name("sqlaqueue_wake", table), "sqlaqueue_limit", table)
