"""Indexes, side tables and triggers are created and dropped with their tables."""

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, cancel, claim, complete, reconcile
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.start_checks import missing_objects
from tests.mapping.tidy import TidyDatabase, created

STRATEGIES = ["update_status", "delete_returning", "batch_select"]


def model(config: QueueConfig, **options: Any) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = config
        __table_args__ = options

        id: Mapped[int] = mapped_column(primary_key=True)

    return Job


OF_THE_TABLE = {
    ("relation", "job"),
    ("relation", "job_id_seq"),
    ("relation", "job_pkey"),
    ("relation", "ix_job_queue_claim"),
    ("type", "job"),
    ("type", "job[]"),
}
LEASES = {("relation", "ix_job_queue_lease"), ("relation", "ix_job_queue_quarantined")}
CONTROL = {
    ("relation", "sqlaqueue_control"),
    ("relation", "sqlaqueue_control_pkey"),
    ("type", "sqlaqueue_control"),
    ("type", "sqlaqueue_control[]"),
}
CONSUMERS = {
    ("relation", "sqlaqueue_consumer"),
    ("relation", "sqlaqueue_consumer_pkey"),
    ("type", "sqlaqueue_consumer"),
    ("type", "sqlaqueue_consumer[]"),
}
CRASH_JOURNAL = {
    ("relation", "sqlaqueue_crash_journal"),
    ("relation", "sqlaqueue_crash_journal_pkey"),
    ("type", "sqlaqueue_crash_journal"),
    ("type", "sqlaqueue_crash_journal[]"),
}
MESSAGES = {
    ("relation", "sqlaqueue_message_job"),
    ("relation", "sqlaqueue_message_job_pkey"),
    ("relation", "ix_sqlaqueue_message_job_claim"),
    ("type", "sqlaqueue_message_job"),
    ("type", "sqlaqueue_message_job[]"),
}
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
EVERYWHERE = OF_THE_TABLE | CONTROL | CONSUMERS | WAKE_UPS
EXPECTED = {
    "update_status": EVERYWHERE | LEASES,
    "delete_returning": (EVERYWHERE - {("relation", "ix_job_queue_claim")}) | MESSAGES | TRIGGERS | CRASH_JOURNAL,
    "batch_select": EVERYWHERE | CRASH_JOURNAL,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_objects_created_by_each_strategy(tidy: TidyDatabase, engine: sa.Engine, strategy: str) -> None:
    metadata = model(QueueConfig(strategy=strategy)).metadata
    with created(engine, metadata):
        assert tidy.objects() - tidy.empty == EXPECTED[strategy]
        metadata.create_all(engine)
        assert tidy.objects() - tidy.empty == EXPECTED[strategy]
    assert tidy.objects() == tidy.empty
    metadata.drop_all(engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tables_can_be_created_and_dropped_individually(tidy: TidyDatabase, engine: sa.Engine, strategy: str) -> None:
    job = model(QueueConfig(strategy=strategy))
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
    job = model(QueueConfig(strategy="delete_returning"))
    with created(engine, job.metadata):
        job.__table__.drop(engine)
        assert tidy.objects() - tidy.empty == MESSAGES | CONTROL | CONSUMERS | CRASH_JOURNAL
        job.metadata.create_all(engine)
        assert tidy.objects() - tidy.empty == EXPECTED["delete_returning"]


def test_a_table_dropped_by_plain_sql_can_be_created_again(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model(QueueConfig(strategy="delete_returning"))
    with created(engine, job.metadata):
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE job"))
        job.metadata.create_all(engine)
        assert tidy.objects() - tidy.empty == EXPECTED["delete_returning"]


def test_create_all_can_be_rolled_back(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model(QueueConfig(strategy="delete_returning"))
    with engine.connect() as connection:
        job.metadata.create_all(connection)
        connection.rollback()
    assert tidy.objects() == tidy.empty


def test_temporary_tables(tidy: TidyDatabase, engine: sa.Engine) -> None:
    job = model(QueueConfig(strategy="batch_select"), prefixes=["TEMPORARY"])
    with engine.connect() as connection, Session(connection) as session:
        # The side tables are not temporary, and are rolled back with this transaction.
        job.metadata.create_all(connection)
        session.add(job())
        session.flush()
        assert len(session.scalars(claim(job, 5)).all()) == 1
    assert tidy.objects() == tidy.empty


# -- schemas and search paths ---------------------------------------------------------------------------


@pytest.fixture
def schemas(tidy: TidyDatabase) -> Iterator[None]:
    with tidy.schemas("work", "elsewhere"):
        yield


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("options", [{"schema": "work"}, {}], ids=["schema named", "schema in the search path"])
def test_triggers_work_under_any_search_path(tidy: TidyDatabase, options: dict[str, str]) -> None:
    job = model(QueueConfig(strategy="delete_returning"), **options)
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
    job = model(QueueConfig(strategy=strategy))
    tenants = [engine.execution_options(schema_translate_map={None: tenant}) for tenant in ("work", "elsewhere")]
    for tenant in tenants:
        job.metadata.create_all(tenant)
    for number, tenant in enumerate(tenants, start=1):
        with Session(tenant) as session:
            session.add_all([job(id=n) for n in range(number)])
            session.commit()
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
    ("strategy", "options"),
    [
        ("update_status", {}),
        ("delete_returning", {}),
        ("delete_returning", {"columns": {"status": None}, "rows_are_messages": True}),
        pytest.param("batch_select", {}, marks=pytest.mark.thorough),
    ],
)
def test_creating_the_table_of_a_queue_creates_its_side_tables(
    database: TidyDatabase, strategy: str, options: dict[str, Any]
) -> None:
    """Without its side tables, the first INSERT would fail in a trigger."""

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy, **options)
        id: Mapped[int] = mapped_column(primary_key=True)

    class Note(Base):
        __tablename__ = "note"
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = sa.create_engine(database.url(), execution_options={"schema_translate_map": {None: "tenant"}})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant")
    table = Base.metadata.tables["job"]
    for _ in range(2):
        Base.metadata.create_all(engine, tables=[table])
    with engine.connect() as connection:
        assert missing_objects(connection, spec_of(Job)) == []
        assert not sa.inspect(connection).has_table("note", schema="tenant")
    with Session(engine) as session:
        session.add(Job())
        session.commit()
        session.scalars(complete(session.scalars(claim(Job, 1)).all())).all()
        session.commit()
    # Objects that exist already are skipped.
    Base.metadata.create_all(engine)
    with engine.connect() as connection:
        assert sa.inspect(connection).has_table("note", schema="tenant")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA tenant CASCADE")
    engine.dispose()
