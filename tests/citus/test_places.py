"""What a queue has in each place that Citus gives its tables, and the places that are refused at the start."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from click import Command
from click.testing import CliRunner
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    FairShare,
    QueueConfig,
    QueueMixin,
    Schedule,
    Tick,
    Unique,
    claim,
    wait,
)
from sqlaqueue.admin import Cancelled, JobFilter, QueueAdmin, doctor
from sqlaqueue.admin.changes import cancel_some, in_batches
from sqlaqueue.citus import Distribution
from sqlaqueue.cli.change import rescue
from sqlaqueue.cli.inspect import why
from sqlaqueue.consumer import pace
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError, WaitTimeout
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.start_checks import misplaced
from sqlaqueue.web import Dashboard
from tests.citus import models as targets
from tests.citus.cluster import CitusDatabase
from tests.citus.conftest import engine_of, schema_in
from tests.citus.models import DISTRIBUTE, execute, job_class, placed
from tests.models import add, new_base
from tests.programs import wait_until
from tests.web.conftest import client, everything

pytestmark = pytest.mark.once

PLACES = ("local", "schema", "distributed")
OPTIONS: dict[str, dict[str, Any]] = {"distributed": {"distribution": Distribution("tenant", [1, 2])}}
CANNOT = "Citus does not if a table is distributed by a column"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """Where the tables of a queue are."""
    return str(request.param)


@pytest.fixture
def own_engine(citus_database: CitusDatabase, place: str) -> Iterator[sa.Engine]:
    with schema_in(citus_database, sharded=place == "schema") as own, engine_of(own) as engine:
        yield engine


class Queue:
    """A queue in its place."""

    def __init__(self, engine: sa.Engine, place: str, job: Any) -> None:
        self.job = placed(engine, job, *(DISTRIBUTE if place == "distributed" else ()))
        self.sessions = sessionmaker(engine)
        self._options = {"poll_interval": 0.05, **OPTIONS.get(place, {})}

    def enqueue(self, keys: range, tenant: int = 1) -> None:
        add(self.sessions, *(self.job(id=key, tenant=tenant) for key in keys))

    def consumer(self, handler: Any = lambda session, job: None, **options: Any) -> Consumer[Any]:
        return Consumer(self.job, handler, self.sessions, **(self._options | options))


def output(engine: sa.Engine, command: Command, *options: str) -> str:
    """Execute a command on the queue that a test has set as ``targets.app``, and return what it prints."""
    url = engine.url.render_as_string(hide_password=False)
    result = CliRunner().invoke(command, [f"{targets.__name__}:app", "--url", url, *options])
    assert result.exit_code == 0, result.output
    return result.output


def odd_keys_fail(session: Session, job: Any) -> None:
    if job.id % 2:
        raise ValueError("odd")


def test_retention(own_engine: sa.Engine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RETENTION", 0.1)
    queue = Queue(own_engine, place, job_class(retention={"completed": 1}))
    queue.enqueue(range(3))
    if place == "distributed":
        with pytest.raises(ConfigurationError, match="Job has retention in its QueueConfig"):
            queue.consumer()
        return
    with queue.consumer(), queue.sessions() as session:
        wait_until(lambda: session.scalar(sa.select(sa.func.count()).select_from(queue.job)) == 0)


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_the_attempt_history(own_engine: sa.Engine, place: str) -> None:
    queue = Queue(own_engine, place, job_class(attempt_history=timedelta(days=1), max_attempts=1))
    queue.enqueue(range(1, 3))
    queue.consumer(odd_keys_fail).drain()
    with queue.sessions() as session:
        outcomes = {key: [each.outcome for each in QueueAdmin(session, queue.job).attempts((key, 1))] for key in (1, 2)}
    assert outcomes == {1: ["failed"], 2: ["completed"]}


@pytest.mark.parametrize("place", ["local", "distributed"], indirect=True)
@pytest.mark.parametrize("skip_unfinished", [False, True])
def test_schedules(own_engine: sa.Engine, place: str, *, skip_unfinished: bool) -> None:
    """The tables of schedules are local ones on the coordinator, wherever the jobs are."""
    job, keys = job_class(), itertools.count()
    schedule = Schedule(
        "each-second", job, every=1, make=lambda tick: job(id=next(keys), tenant=2), skip_unfinished=skip_unfinished
    )
    queue, ran = Queue(own_engine, place, job), list[Any]()
    with queue.consumer(lambda session, job: ran.append(Tick.of(session, job)), schedules=[schedule]):
        wait_until(lambda: len(ran) >= 2)
    assert {tick.schedule for tick in ran} == {"each-second"}
    assert len({tick.at for tick in ran}) == len(ran)


def test_wait(own_engine: sa.Engine, place: str) -> None:
    queue = Queue(own_engine, place, job_class(max_attempts=1))
    queue.enqueue(range(1, 3))
    with queue.sessions() as session:
        jobs = session.scalars(sa.select(queue.job).order_by(queue.job.id)).all()
    with pytest.raises(WaitTimeout):
        wait(queue.sessions, jobs[0], timeout=0.1)
    with queue.consumer(odd_keys_fail):
        assert [wait(queue.sessions, job, timeout=30).state for job in jobs] == ["failed", "completed"]
    assert wait(queue.sessions, jobs[1], timeout=30).state == "completed", "it had ended before"


def test_the_doctor(own_engine: sa.Engine, place: str) -> None:
    queue = Queue(own_engine, place, job_class())
    queue.enqueue(range(300))
    of_the_server = {"fsync_off", "full_page_writes_off", "synchronous_commit_off", "small_lock_table"}
    with queue.sessions() as session:
        found = {each.code for each in doctor(session, queue.job, deep=True)} - of_the_server
    assert found == (set() if place == "local" else {"on_shards"})


def test_the_doctor_sees_an_altered_index(own_engine: sa.Engine, place: str) -> None:
    queue = Queue(own_engine, place, job_class())
    with own_engine.begin() as connection:
        connection.exec_driver_sql("DROP INDEX ix_job_queue_claim")
        connection.exec_driver_sql(
            "CREATE INDEX ix_job_queue_claim ON job (priority, run_at, id, tenant) WHERE status = 'failed'"
        )
    with queue.sessions() as session:
        found = [each.summary for each in doctor(session, queue.job) if each.code == "altered_index"]
    assert len(found) == 1
    assert "ix_job_queue_claim" in found[0]


def test_what_operators_read_and_change(own_engine: sa.Engine, place: str) -> None:
    queue = Queue(own_engine, place, job_class(max_attempts=1))
    queue.enqueue(range(6))
    queue.consumer(odd_keys_fail).drain()
    queue.enqueue(range(10, 12), tenant=2)
    job = queue.job
    with queue.sessions() as session:
        admin = QueueAdmin(session, job)
        stats = admin.stats()
        assert (stats.due, stats.states["failed"], stats.states["completed"]) == (2, 3, 3)
        assert not stats.missing_indexes
        assert [group.count for group in admin.failures()] == [3]
        assert len(admin.jobs()) == 8
        assert "pending" in str(admin.explain((10, 2)))
        assert len(admin.cancel(sa.select(job).where(job.status == "pending")).cancelled) == 2
        assert admin.requeue(sa.select(job).where(job.status == "failed")) == 3
        session.commit()
        assert admin.stats().states["pending"] == 3


def test_changes_of_jobs_of_several_tenants(own_engine: sa.Engine, place: str) -> None:
    """Each statement changes the jobs of one tenant, as Citus locks rows on one shard only."""
    queue = Queue(own_engine, place, job_class(max_attempts=1))
    job = queue.job
    for tenant in (1, 2):
        queue.enqueue(range(4), tenant=tenant)
    queue.consumer(odd_keys_fail).drain()
    with queue.sessions() as session:
        admin = QueueAdmin(session, job)
        assert admin.requeue() == 4
        assert len(admin.cancel().cancelled) == 4
        cancelled = session.scalars(sa.select(job).where(job.status == "cancelled").order_by(job.id, job.tenant)).all()
        assert admin.requeue(cancelled) == 4
        keys = [(each.id, each.tenant) for each in cancelled]
        assert admin.cancel(cancelled) == Cancelled(cancelled=keys)
        assert admin.requeue(JobFilter(states=("cancelled",))) == 4
        assert list(in_batches(session, job, JobFilter(states=("pending",)), cancel_some)) == [4]
        assert admin.purge() == 8


def test_the_rescue_of_jobs_of_several_tenants(
    own_engine: sa.Engine, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(own_engine, place, job_class(lease=1))
    monkeypatch.setattr(targets, "app", queue.job, raising=False)
    with queue.sessions() as session:
        for tenant in (1, 2):
            queue.enqueue(range(2), tenant=tenant)
            session.scalars(claim(sa.select(queue.job).where(queue.job.tenant == tenant), 2)).all()
            session.commit()
        admin = QueueAdmin(session, queue.job)
        assert admin.rescue() == 0
        wait_until(lambda: admin.stats().expired_leases == 4)
        session.rollback()
        assert output(own_engine, rescue, "--dry-run") == "job: 4 jobs would be rescued\n"
        assert admin.rescue() == 4
        assert admin.stats().due == 4


def test_the_depth(own_engine: sa.Engine, place: str) -> None:
    queue = Queue(own_engine, place, job_class())
    for tenant in (1, 2):
        queue.enqueue(range(3), tenant=tenant)
    with queue.sessions() as session:
        session.add(queue.job(id=9, tenant=2, priority=5, run_at=sa.func.now() + timedelta(hours=1)))
        session.commit()
        depth = QueueAdmin(session, queue.job).depth()
        assert (depth.pending, depth.due, depth.processing, depth.expired) == (7, 6, 0, 0)
        assert depth.oldest_due is not None
        assert QueueAdmin(session, queue.job).depth(limit=4).due == 4


def test_why_a_queue_does_not_run(own_engine: sa.Engine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(own_engine, place, job_class())
    queue.enqueue(range(2))
    add(queue.sessions, queue.job(id=9, tenant=2, run_at=sa.func.now() + timedelta(hours=1)))
    monkeypatch.setattr(targets, "app", queue.job, raising=False)
    assert re.search("Due: 2 jobs, .*; the next one is due at ", output(own_engine, why))


def test_the_dashboard(own_engine: sa.Engine, place: str) -> None:
    """It lists jobs everywhere. Of a distributed table it neither lists due jobs nor explains claims, and says so."""
    queue = Queue(own_engine, place, job_class(max_attempts=1))
    queue.enqueue(range(6))
    queue.consumer(odd_keys_fail).drain()
    queue.enqueue(range(10, 14), tenant=2)
    pages = {
        "": 0,
        "queues/job": 0,
        "queues/job/claim": 0,
        "queues/job/jobs": 10,
        "queues/job/jobs?state=failed": 3,
        "queues/job/jobs?state=pending": 4,
        "queues/job/jobs?state=due": 4,
        "queues/job/jobs?state=completed": 3,
        "queues/job/job?key=1%2C1": 0,
    }

    async def read() -> dict[str, str]:
        async with client(Dashboard([queue.job], queue.sessions, access=everything)) as browser:
            answers = {page: await browser.get(f"/{page}") for page in pages}
        assert {answer.status_code for answer in answers.values()} == {200}
        return {page: answer.text for page, answer in answers.items()}

    texts = asyncio.run(read())
    cannot = {page for page, text in texts.items() if CANNOT in text}
    lists_and_claim = {page for page in pages if page.startswith("queues/job/") and "?key" not in page}
    assert cannot == (lists_and_claim if place == "distributed" else set())
    for page, text in texts.items():
        assert "SQLSTATE" not in text
        if "/jobs" in page and not (place == "distributed" and page.endswith("due")):
            assert len(set(re.findall(r"job\?key=([\d%C]+)", text))) == pages[page], page


# -- places where no Consumer can serve the tables are refused, with what to do ----------------------------------------


TENANT = Distribution("tenant", [1, 2])


def refusal(engine: sa.Engine, job: Any, **options: Any) -> str:
    """Return why a Consumer does not start."""
    consumer = Consumer(job, lambda session, job: None, sessionmaker(engine), **options)
    with pytest.raises(DatabaseNotReadyError) as caught:
        consumer.drain()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("Job: ")
    return text


def test_a_reference_table(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), "SELECT create_reference_table('job')")
    assert "job is a reference table of Citus, of which each claim and each insert waits" in refusal(engine, job)


def test_a_distributed_table_without_values(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), *DISTRIBUTE)
    assert "give the Consumer distribution=Distribution('tenant', values)" in refusal(engine, job)


def test_a_filter_is_not_enough(engine: sa.Engine) -> None:
    """A claim with it would work, but neither a rescue nor the extension of leases."""
    job = placed(engine, job_class(), *DISTRIBUTE)
    assert "distribution=Distribution('tenant', values)" in refusal(engine, sa.select(job).where(job.tenant == 1))


def test_another_column(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), *DISTRIBUTE)
    text = refusal(engine, job, distribution=Distribution("id", [1]))
    assert "job is distributed by tenant, but the Consumer has Distribution('id'); give it distribution=" in text
    execute(engine, text.partition("or execute ")[2])
    Consumer(job, lambda session, job: None, sessionmaker(engine), distribution=Distribution("id", [1])).drain()


def test_an_attribute_of_another_name_than_its_column(engine: sa.Engine) -> None:
    class Job(QueueMixin, new_base()):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="update_status", notify=False)
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[int] = mapped_column("tenant", primary_key=True)

    placed(engine, Job, *DISTRIBUTE)
    assert "distribution=Distribution('customer', values)" in refusal(engine, Job)
    text = refusal(engine, Job, distribution=Distribution("id", [1]))
    assert "give it distribution=Distribution('customer', values)" in text


def test_a_local_table_with_values(engine: sa.Engine) -> None:
    job = placed(engine, job_class())
    text = refusal(engine, job, distribution=TENANT)
    assert "job is not distributed by a column; execute SELECT create_distributed_table('job', 'tenant'), or" in text
    assert text.endswith("leave the argument out")


def test_a_local_table_with_values_and_triggers(engine: sa.Engine) -> None:
    job = placed(engine, job_class(notify=True))
    assert "use QueueConfig(notify=False), migrate, as Citus" in refusal(engine, job, distribution=TENANT)


def test_a_refused_start_logs_no_statement(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """A rescue that runs beside the check of the start fails as well, and says nothing of the fix."""
    job = placed(engine, job_class(), *DISTRIBUTE)
    for _ in range(5):
        refusal(engine, job)
    assert "maintenance" not in caplog.text


@pytest.mark.parametrize("values", [["x"], [None], lambda: 5, lambda: [1, "x"], lambda: [1 // 0]])
def test_values_that_no_row_has(engine: sa.Engine, values: Any) -> None:
    """Each claim would fail, and be tried again for ever."""
    job = placed(engine, job_class(), *DISTRIBUTE)
    with pytest.raises(ConfigurationError, match=r"Distribution\('tenant', values\): "):
        Consumer(
            job, lambda session, job: None, sessionmaker(engine), distribution=Distribution("tenant", values)
        ).drain()


def test_a_local_control_table_beside_a_distributed_one(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), DISTRIBUTE[0])
    assert "SELECT create_reference_table('sqlaqueue_control')" in refusal(engine, job, distribution=TENANT)


def test_heartbeats_that_wait_for_each_other(engine: sa.Engine) -> None:
    job = placed(
        engine,
        job_class(),
        *DISTRIBUTE,
        "SELECT undistribute_table('sqlaqueue_consumer')",
        "SELECT create_reference_table('sqlaqueue_consumer')",
    )
    assert "SELECT undistribute_table('sqlaqueue_consumer')" in refusal(engine, job, distribution=TENANT)


@pytest.mark.parametrize("kind", ["reference", "distributed"])
def test_side_tables_elsewhere_than_a_local_table(engine: sa.Engine, kind: str) -> None:
    place = {
        "reference": "SELECT create_reference_table('sqlaqueue_control')",
        "distributed": "SELECT create_distributed_table('sqlaqueue_control', 'queue')",
    }
    job = placed(engine, job_class(), place[kind])
    text = refusal(engine, job)
    assert f"sqlaqueue_control is {'a reference table' if kind == 'reference' else 'distributed by queue'}" in text
    assert "create both as local tables" in text


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("strategy='batch_select'", {"strategy": "batch_select"}),
        ("strategy='delete_returning'", {"strategy": "delete_returning"}),
        ("notify=True", {"notify": True}),
        ("unique", {"unique": Unique("tenant")}),
        ("of ConcurrencyLimit in QueueConfig", {"flow_control": [ConcurrencyLimit(1)]}),
        (
            "of ConcurrencyLimit and FairShare in QueueConfig",
            {"flow_control": [ConcurrencyLimit(1), FairShare("tenant")]},
        ),
        ("attempt_history", {"attempt_history": 3600}),
        ("statistics", {"statistics": True}),
    ],
)
def test_options_on_shards(engine: sa.Engine, sharded_engine: sa.Engine, option: str, config: dict[str, Any]) -> None:
    """The tables are those of a plain queue: Citus itself refuses some of the triggers."""
    placed(sharded_engine, job_class())
    placed(engine, job_class(), *DISTRIBUTE)
    spec = spec_of(job_class(**config))
    for each, on_shard in ((sharded_engine, spec), (engine, spec.for_shard("tenant", 1))):
        with each.connect() as connection:
            text = misplaced(connection, on_shard)
        assert text is not None
        assert text.startswith("Job: job is on shards of Citus")
        assert option in text


def test_triggers_in_a_distributed_schema(sharded_engine: sa.Engine) -> None:
    with pytest.raises(
        DatabaseNotReadyError, match=r"^job: Citus creates no triggers .* use QueueConfig.notify=False."
    ):
        job_class(notify=True).metadata.create_all(sharded_engine)
    with pytest.raises(DatabaseNotReadyError, match=r'QueueConfig\(strategy="update_status", notify=False\)'):
        job_class(strategy="delete_returning").metadata.create_all(sharded_engine)


def test_schedules_in_a_distributed_schema(sharded_engine: sa.Engine) -> None:
    job = job_class()
    Schedule("hourly", job, every=3600, values={"id": 1, "tenant": 1})
    with pytest.raises(DatabaseNotReadyError, match=r"^sqlaqueue_schedule: Citus creates no triggers .* no schedules"):
        job.metadata.create_all(sharded_engine)
