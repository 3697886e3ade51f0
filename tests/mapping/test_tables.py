"""The tables of queues: what is created and dropped with them, two in one database, and their partition keys."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    Consumer,
    QueueConfig,
    QueueMixin,
    Unique,
    cancel,
    claim,
    complete,
    fail,
    purge,
    reconcile,
    requeue,
    retry,
)
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.start_checks import missing_objects
from tests.mapping.conftest import TidyDatabase, created
from tests.models import STRATEGIES, add, execute, make_job, new_base
from tests.servers import Database


def table(name: str) -> set[tuple[str, str]]:
    return {("relation", name), ("relation", f"{name}_pkey"), ("type", name), ("type", f"{name}[]")}


OF_THE_TABLE = table("job") | {("relation", "job_id_seq"), ("relation", "ix_job_queue_claim")}
LEASES = {("relation", "ix_job_queue_lease"), ("relation", "ix_job_queue_quarantined")}
SHARED = table("sqlaqueue_control") | table("sqlaqueue_consumer")
CRASH_JOURNAL = table("sqlaqueue_crash_journal")
MESSAGES = table("sqlaqueue_message_job") | {("relation", "ix_sqlaqueue_message_job_claim")}
TRIGGERS = {
    ("function", "sqlaqueue_message_job_sync"),
    ("trigger", "sqlaqueue_message_insert"),
    ("trigger", "sqlaqueue_message_update"),
    ("trigger", "sqlaqueue_message_delete"),
    ("trigger", "sqlaqueue_message_truncate"),
}
WAKE_UPS = {
    ("function", "sqlaqueue_wake_job"),
    ("trigger", "sqlaqueue_wake_insert"),
    ("trigger", "sqlaqueue_wake_update_22793158"),
}
EVERYWHERE = OF_THE_TABLE | SHARED | WAKE_UPS
EXPECTED = {
    "update_status": EVERYWHERE | LEASES,
    "delete_returning": (EVERYWHERE - {("relation", "ix_job_queue_claim")}) | MESSAGES | TRIGGERS | CRASH_JOURNAL,
    "batch_select": EVERYWHERE | CRASH_JOURNAL,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_objects_created_by_each_strategy(tidy: TidyDatabase, engine: sa.Engine, strategy: str) -> None:
    metadata = make_job(strategy).metadata
    with created(engine, metadata):
        assert tidy.objects() - tidy.empty == EXPECTED[strategy]
        metadata.create_all(engine)
        assert tidy.objects() - tidy.empty == EXPECTED[strategy]
    assert tidy.objects() == tidy.empty
    metadata.drop_all(engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tables_can_be_created_and_dropped_individually(tidy: TidyDatabase, engine: sa.Engine, strategy: str) -> None:
    job = make_job(strategy)
    tables = job.metadata.sorted_tables
    for order in (tables, tables[::-1]):
        for table in order:
            table.create(engine)
            table.create(engine, checkfirst=True)
        assert tidy.objects() - tidy.empty == EXPECTED[strategy]
        with Session(engine) as session:
            session.add(job())
            session.commit()
            session.execute(complete(session.scalars(claim(job, 1)).one()))
            session.commit()
        for table in order:
            table.drop(engine)
            table.drop(engine, checkfirst=True)
        assert tidy.objects() == tidy.empty


def test_a_trigger_function_is_dropped_with_its_table(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = make_job("delete_returning")
    with created(engine, job.metadata):
        job.__table__.drop(engine)
        assert tidy.objects() - tidy.empty == MESSAGES | SHARED | CRASH_JOURNAL
        job.metadata.create_all(engine)
        assert tidy.objects() - tidy.empty == EXPECTED["delete_returning"]


def test_a_table_dropped_by_plain_sql_can_be_created_again(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = make_job("delete_returning")
    with created(engine, job.metadata):
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE job"))
        job.metadata.create_all(engine)
        assert tidy.objects() - tidy.empty == EXPECTED["delete_returning"]


def test_create_all_can_be_rolled_back(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = make_job("delete_returning")
    with engine.connect() as connection:
        job.metadata.create_all(connection)
        connection.rollback()
    assert tidy.objects() == tidy.empty


def test_temporary_tables(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = make_job("batch_select", {"__table_args__": {"prefixes": ["TEMPORARY"]}})
    with engine.connect() as connection, Session(connection) as session:
        # The side tables are not temporary, and are rolled back with this transaction.
        job.metadata.create_all(connection)
        session.add(job())
        session.flush()
        assert len(session.scalars(claim(job, 5)).all()) == 1
    assert tidy.objects() == tidy.empty


# -- schemas and search paths ------------------------------------------------------------------------------------------


@pytest.fixture
def schemas(tidy: TidyDatabase) -> Iterator[None]:
    with tidy.schemas("work", "elsewhere"):
        yield


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("options", [{"schema": "work"}, {}], ids=["schema named", "schema in the search path"])
def test_triggers_work_under_any_search_path(tidy: TidyDatabase, options: dict[str, str]) -> None:
    job = make_job("delete_returning", {"__table_args__": options})
    arguments = {} if options else {"options": "-csearch_path=work"}
    engine = sa.create_engine(tidy.database.url(), connect_args=arguments)
    with created(engine, job.metadata):
        tidy.connection.execute("SET search_path = elsewhere")
        tidy.connection.execute("INSERT INTO work.job DEFAULT VALUES")
        tidy.connection.execute("INSERT INTO work.job DEFAULT VALUES")
        tidy.connection.execute("UPDATE work.job SET run_at = run_at - '1 day'::interval, priority = -1 WHERE id = 2")
        tidy.connection.execute("DELETE FROM work.job WHERE id = 1")
        tidy.connection.execute("RESET search_path")
        with Session(engine) as session:
            assert session.scalars(reconcile(job)).all() == []
            assert [job.id for job in session.scalars(claim(job, 5))] == [2]
    engine.dispose()


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_model_for_tenants_in_separate_schemas(tidy: TidyDatabase, engine: sa.Engine, strategy: str) -> None:
    job = make_job(strategy)
    tenants = [engine.execution_options(schema_translate_map={None: tenant}) for tenant in ("work", "elsewhere")]
    for tenant in tenants:
        job.metadata.create_all(tenant)
    for number, tenant in enumerate(tenants, start=1):
        add(tenant, *(job(id=n) for n in range(number)))
    with Session(tenants[0]) as one, Session(tenants[1]) as other:
        assert one.scalars(cancel(job)).all() == [0]
        jobs = other.scalars(claim(job, 5)).all()
        assert [job.id for job in jobs] == [0, 1]
        assert other.scalars(complete(jobs)).all() == [0, 1]
        one.commit()
        other.commit()
    for tenant in tenants:
        job.metadata.drop_all(tenant)
    assert {schema for kind, schema in tidy.objects() - tidy.empty if kind != "schema"} == set()


@pytest.mark.parametrize(
    "kind",
    [
        "update_status",
        "delete_returning",
        "rows_are_messages",
        pytest.param("batch_select", marks=pytest.mark.thorough),
    ],
)
def test_creating_the_table_of_a_queue_creates_its_side_tables(database: Database, kind: str) -> None:
    """Without its side tables, the first INSERT would fail in a trigger."""
    # One of its own, to whose MetaData another table is added.
    job = make_job(kind, {"payload": mapped_column(sa.Text)})
    sa.Table("note", job.metadata, sa.Column("id", sa.Integer, primary_key=True))
    engine = sa.create_engine(database.url(), execution_options={"schema_translate_map": {None: "tenant"}})
    execute(engine, "CREATE SCHEMA tenant")
    for _ in range(2):
        job.metadata.create_all(engine, tables=[job.__table__])
    with engine.connect() as connection:
        assert missing_objects(connection, spec_of(job)) == []
        assert not sa.inspect(connection).has_table("note", schema="tenant")
    with Session(engine) as session:
        session.add(job())
        session.commit()
        session.scalars(complete(session.scalars(claim(job, 1)).all())).all()
        session.commit()
    # Objects that exist already are skipped.
    job.metadata.create_all(engine)
    with engine.connect() as connection:
        assert sa.inspect(connection).has_table("note", schema="tenant")
    engine.dispose()


# -- two queues in one MetaData, database and process ------------------------------------------------------------------


class Queues:
    def __init__(self, first: QueueConfig, second: QueueConfig, name: str = "second", **options: Any) -> None:
        base = new_base()

        class First(QueueMixin, base):
            __tablename__ = "first"
            __queue__ = first
            id: Mapped[int] = mapped_column(primary_key=True)

        class Second(QueueMixin, base):
            __tablename__ = name
            __queue__ = second
            __table_args__ = options
            id: Mapped[int] = mapped_column(primary_key=True)

        self.metadata, self.First, self.Second = base.metadata, First, Second


UPDATE, DELETE, BATCH = (
    QueueConfig(strategy=strategy) for strategy in ("update_status", "delete_returning", "batch_select")
)
OWN = QueueConfig(strategy="delete_returning", rows_are_messages=True)
PAIRS = {
    "update-delete": (UPDATE, DELETE),
    "delete-batch": (DELETE, BATCH),
    "batch-update": (BATCH, UPDATE),
    "delete-delete": (DELETE, DELETE),
    "own-own": (OWN, OWN),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[QueueConfig, QueueConfig]:
    return PAIRS[request.param]


@pytest.fixture(params=["two tables", "two schemas"])
def queues(
    request: pytest.FixtureRequest, pair: tuple[QueueConfig, QueueConfig], tidy: TidyDatabase, engine: sa.Engine
) -> Iterator[Queues]:
    in_schema = request.param == "two schemas"
    queues = Queues(*pair, name="first", schema="work") if in_schema else Queues(*pair)
    with tidy.schemas(*["work"] * in_schema), created(engine, queues.metadata):
        yield queues


def ids(jobs: Any) -> list[int]:
    return sorted(job.id for job in jobs)


def test_two_queues_are_independent(queues: Queues, engine: sa.Engine) -> None:
    q = queues
    with Session(engine) as session:
        session.add_all([q.First(id=1), q.First(id=2), q.Second(id=1)])
        session.commit()
        first = session.scalars(claim(q.First, 10)).all()
        second = session.scalars(claim(q.Second, 10)).all()
        assert (ids(first), ids(second)) == ([1, 2], [1])
        assert {type(job) for job in first} == {q.First}
        session.execute(fail(first))
        session.execute(retry(second))
        session.commit()
        assert session.scalars(claim(q.First, 10)).all() == []
        assert ids(session.scalars(claim(q.Second, 10))) == [1]
        session.rollback()
        assert session.scalars(requeue(q.Second)).all() == []
        assert session.scalars(purge(q.Second)).all() == []
        assert sorted(session.scalars(requeue(q.First)).all()) == [1, 2]
        session.commit()
        assert session.scalars(cancel(sa.select(q.Second).where(q.Second.id == 1))).all() == [1]
        session.commit()
        assert ids(session.scalars(claim(q.First, 10))) == [1, 2]


def test_jobs_of_two_queues_in_one_verb_are_refused(queues: Queues, engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([queues.First(), queues.Second()])
        session.commit()
        jobs = [session.scalars(claim(model, 1)).one() for model in (queues.First, queues.Second)]
        with pytest.raises(StatementError, match=r"different queues \(First, Second\); call it once for each queue"):
            complete(jobs)


@pytest.mark.few(2)
def test_one_process_runs_two_queues(queues: Queues, engine: sa.Engine) -> None:
    factory, done = sessionmaker(engine), []
    add(factory, *(model(id=n) for model in (queues.First, queues.Second) for n in range(20)))

    def handle(session: Session, job: Any) -> None:
        done.append((type(job), job.id))

    consumers = [Consumer(model, handle, factory) for model in (queues.First, queues.Second)]
    threads = [threading.Thread(target=consumer.drain) for consumer in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {(model, n) for model in (queues.First, queues.Second) for n in range(20)}
    assert set(done) == expected
    assert len(done) == len(expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_side_tables_are_in_the_schema_of_the_queue(strategy: str) -> None:
    config = QueueConfig(strategy=strategy)

    class Base(DeclarativeBase):
        metadata = sa.MetaData(schema="work")

    for name, schema in (("one", sa.BLANK_SCHEMA), ("two", sa.BLANK_SCHEMA), ("three", None), ("four", "other")):
        options = {} if schema is None else {"schema": schema}
        body = {"__tablename__": name, "__queue__": config, "__table_args__": options}
        type(name, (QueueMixin, Base), {**body, "id": mapped_column(sa.Integer, primary_key=True)})
    tables = {(table.schema, table.name) for table in Base.metadata.tables.values()}
    shared = {"sqlaqueue_control", "sqlaqueue_consumer"}
    if strategy != "update_status":
        shared.add("sqlaqueue_crash_journal")
    expected = {(schema, name) for schema in (None, "work", "other") for name in shared}
    for place in ((None, "one"), (None, "two"), ("work", "three"), ("other", "four")):
        expected.add(place)
        if strategy == "delete_returning":
            expected.add((place[0], f"sqlaqueue_message_{place[1]}"))
    assert tables == expected


# -- partition keys of queue tables: what is refused when the class is mapped, and what is not -------------------------


def partitioned(by: str, *, key: tuple[str, ...] = ("id", "tenant", "created_at"), **config: Any) -> Any:
    def column(name: str, kind: Any, **more: Any) -> Any:
        return mapped_column(name, kind, primary_key=name in key, **more)

    attributes = {
        "__table_args__": {"postgresql_partition_by": by},
        "id": column("id", sa.BigInteger, autoincrement=False),
        "tenant": column("tenant", sa.Text),
        "Day": column("Day", sa.Date),
        "kind": column("kind", sa.Text),
        "created_at": column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now()),
    }
    if not key:
        attributes["__mapper_args__"] = {"primary_key": [attributes["id"].column]}
    return make_job("update_status", attributes, columns={"created_at": "created_at"}, **config)


@pytest.mark.parametrize(
    ("partition_by", "options"),
    [
        ("RANGE (created_at)", {}),
        ("range(Tenant, Created_At)", {}),
        ('HASH (tenant text_ops, "id")', {}),
        ("LIST (tenant)", {"unique": Unique("kind", "tenant"), "key": ("id", "tenant")}),
        ('LIST (tenant COLLATE "C")', {"key": ()}),
        ("RANGE (date_trunc('day', created_at AT TIME ZONE 'UTC'), tenant)", {"key": ()}),
        ("RANGE (created_at)", {"key": ()}),
    ],
)
def test_a_partition_key_is_accepted_by_the_server_as_well(database: Database, partition_by: str, options: Any) -> None:
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    partitioned(partition_by, **options).metadata.create_all(engine)


@pytest.mark.parametrize(
    ("partition_by", "options", "message"),
    [
        ("RANGE (run_at)", {"key": ()}, r"Job.run_at is the run_at of the queue, which changes .* the created_at$"),
        ("LIST (status)", {"key": ()}, "Job.status is the status of the queue, which changes while a job is in it"),
        ("HASH (id, kind)", {}, r"the primary key .* lacks Job.kind; declare primary_key=True there as well"),
        ('RANGE ("Day", tenant)', {"key": ("id",)}, r"lacks Job.Day, Job.tenant;"),
        ("LIST (day)", {}, "the table job has no column 'day'"),
        ("LIST (tenants)", {}, "has no column 'tenants'; did you mean 'tenant'"),
        (
            "RANGE (tenant, extract(year FROM created_at))",
            {},
            "the partition key has an expression, and PostgreSQL then allows no primary key; partition by columns",
        ),
        ("RANGE ((created_at::date))", {"key": (), "unique": Unique("kind")}, r"allows no QueueConfig\(unique=...\)"),
        (
            "RANGE (created_at)",
            {"unique": Unique("kind")},
            r"unique=Unique\('kind', ...\)\): .* add Job.created_at, if jobs may be equal otherwise, or partition by",
        ),
        # The index has the number of the period, not the column.
        ("RANGE (created_at)", {"unique": Unique("kind", within=3600)}, "add Job.created_at"),
    ],
)
def test_a_partition_key_is_refused(partition_by: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        partitioned(partition_by, **options)
    assert str(refused.value).startswith(f"Job: postgresql_partition_by={partition_by!r}: ")
