"""``QueueAdmin.explain()``: why a job does not run, or would not be enqueued; and changes that the database refuses."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from sqlaqueue import QueueConfig, QueueMixin, Unique, claim, complete, enqueue, fail, pause, rescue, retry
from sqlaqueue.admin import AsyncQueueAdmin, QueueAdmin
from sqlaqueue.exc import NotAQueueError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from tests.admin.models import HELD, Setup, claimed, make_animals, make_rows
from tests.models import make_job
from tests.servers import Database
from tests.unique.models import KEEPING_ROWS, KINDS

HOUR = timedelta(hours=1)


def now() -> datetime:
    return datetime.now(UTC)


def test_a_job_that_is_ready(setup: Setup) -> None:
    setup.add(setup.model(id=1))
    setup.add_consumer()
    for key in (1, "1", (1,)):
        explanation = setup.explain(key)
        assert (explanation.queue, explanation.key, explanation.state) == ("job", 1, "pending")
        assert [reason.code for reason in explanation.reasons] == ["ready"]
    assert str(explanation).startswith("job 1 is pending\n  ready: It is due, and nothing stands against it")
    with Session(setup.engine) as session:
        job = session.get_one(setup.model, 1)
        assert QueueAdmin(session, setup.model).explain(job) == explanation


def test_a_job_that_does_not_exist(setup: Setup) -> None:
    explanation = setup.explain("7")
    assert (explanation.key, explanation.state) == ("7", "missing")
    assert [reason.code for reason in explanation.reasons] == ["missing"]
    assert "There is no job 7 in job: it was never enqueued" in explanation.reasons[0].text
    assert ("dead letters" in explanation.reasons[0].text) == (not spec_of(setup.model).strategy.keeps_rows)


def test_a_job_whose_completion_or_retention_deletes_it(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", on_complete="delete", retention={"failed": 60})
    text = setup.text("missing")
    assert 'on_complete="delete" deletes' in text
    assert "it has finished (failed) and its retention time is over" in text


def test_a_paused_queue(setup: Setup) -> None:
    setup.add(setup.model(id=1))
    setup.add_consumer()
    with Session(setup.engine) as session, session.begin():
        session.execute(pause(setup.model))
    assert setup.codes() == ["paused"]
    assert f"The queue job has been paused since {now():%Y-%m-%d %H}" in setup.text("paused")


def test_a_job_that_is_not_due(setup: Setup) -> None:
    setup.add(setup.model(id=1, run_at=now() + 2 * HOUR, attempts=3))
    setup.add_consumer()
    assert setup.codes() == ["not_due"]
    text = setup.text("not_due")
    assert "in 1 h 59 min" in text
    assert "UTC" in text
    assert "its attempt 3 has failed or was released" in text


def test_no_consumer(setup: Setup) -> None:
    setup.add(setup.model(id=1))
    assert setup.codes() == ["no_consumer"]
    setup.add_consumer()
    setup.execute("UPDATE sqlaqueue_consumer SET expires_at = now()")
    assert setup.codes() == ["no_consumer"]


def test_consumers_that_only_poll(setup: Setup) -> None:
    setup.add(setup.model(id=1))
    setup.add_consumer("web:1", listening=False)
    assert setup.codes() == ["polling"]
    assert "(web:1) receive no notifications" in setup.text("polling")
    setup.add_consumer("web:2")
    assert setup.codes() == ["ready"]


def test_busy_consumers(setup: Setup) -> None:
    setup.add(setup.model(id=1))
    for number in range(5):
        setup.add_consumer(f"web:{number}", running=[["8"], ["9"]], claimed=3)
    assert setup.codes() == ["busy"]
    assert "web:0 (2 running, 3 claimed), web:1" in setup.text("busy")
    assert "and 2 more" in setup.text("busy")
    setup.add_consumer("web:9")
    assert setup.codes() == ["ready"]


def test_jobs_before_it(setup: Setup) -> None:
    early = now() - HOUR
    later = [setup.model(id=9, run_at=now() + HOUR)]
    setup.add(*(setup.model(id=number, run_at=early) for number in range(1, 5)), *later)
    setup.add_consumer()
    with Session(setup.engine) as worker:
        claimed(worker, setup.model)
        # A held job still reads as pending, and counts.
        if not spec_of(setup.model).strategy.holds_transaction:
            worker.rollback()
        assert setup.text("jobs_before", 4).startswith("3 due jobs are before it")
        assert setup.text("jobs_before", 2).startswith("1 due job is before it")
    assert setup.codes(1) == ["ready"]


def test_jobs_before_it_are_counted_up_to_a_limit(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.add(*(setup.model(id=number, run_at=now() - HOUR) for number in range(1, 1003)))
    assert setup.text("jobs_before", 1002).startswith("at least 1000 due jobs are")


def test_jobs_before_it_where_the_order_has_null(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.execute("ALTER TABLE job ALTER run_at DROP NOT NULL")
    setup.add(*(setup.model(id=number, run_at=now() - HOUR) for number in (1, 2, 3, 4)))
    setup.execute("UPDATE job SET run_at = NULL WHERE id IN (2, 3)")
    # A job without a time comes after those with one, and after those without one and a smaller key.
    spec = spec_of(setup.model)
    spec.columns["run_at"].nullable = True
    assert setup.text("jobs_before", 2).startswith("2 due jobs")
    assert setup.text("jobs_before", 3).startswith("3 due jobs")
    assert setup.text("jobs_before", 4).startswith("1 due job ")


def test_a_job_of_this_transaction(setup: Setup) -> None:
    setup.add_consumer()
    with Session(setup.engine) as session:
        job = setup.model(id=1)
        session.add(job)
        session.flush()
        found = [reason.code for reason in QueueAdmin(session, setup.model).explain(job).reasons]
        assert found[0] == "uncommitted"


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_finished_jobs(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=1), setup.model(id=2), setup.model(id=3))
    with Session(engine) as session:
        QueueAdmin(session, setup.model).cancel([session.get_one(setup.model, 3)])
        first, second = claimed(session, setup.model, 2)
        session.execute(complete(first))
        session.execute(fail(second, error="ValueError: no\nTraceback"))
        session.commit()
    assert [setup.explain(key).state for key in (1, 2, 3)] == ["completed", "failed", "cancelled"]
    assert [setup.codes(key) for key in (1, 2, 3)] == [["finished"]] * 3
    assert setup.text("finished", 1).startswith(f"It was completed at {now():%Y-%m-%d}")
    failed = setup.text("finished", 2)
    assert "after 1 attempts with the last error 'ValueError: no';" in failed
    assert setup.text("finished", 3).startswith("It was cancelled at")


def test_a_dead_letter(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "rows_are_messages").with_job()
    with Session(engine) as session, session.begin():
        session.execute(fail(claimed(session, setup.model), error="ValueError: no"))
    assert (setup.explain().state, setup.codes()) == ("failed", ["finished"])
    assert "with the last error 'ValueError: no'" in setup.text("finished")


def test_a_job_that_was_cancelled_for_its_duplicate(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=Unique("key", states=("pending",))).with_job(key="a")
    with Session(engine) as session:
        jobs = claimed(session, setup.model)
        session.commit()
        setup.add(setup.model(id=2, key="a"))
        session.execute(retry(jobs)).all()
        session.commit()
    assert setup.codes() == ["duplicate", "finished"]
    assert "since job 2 had equal key" in setup.text("duplicate")


def test_a_job_that_waits_for_its_duplicate(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=Unique("key", states=("pending",), on_return="wait")).with_job(
        key="a"
    )
    setup.add_consumer()
    with Session(engine) as session:
        jobs = claimed(session, setup.model)
        session.commit()
        setup.add(setup.model(id=2, key="a"))
        session.execute(retry(jobs)).all()
        session.commit()
        assert (setup.explain().state, setup.codes()) == ("processing", ["waits_for_duplicate"])
        assert "it waits for job 2, which has equal key and is pending" in setup.text("waits_for_duplicate")
        setup.execute("DELETE FROM job WHERE id = 2")
        assert setup.codes() == ["waits_for_duplicate"]
        assert "the duplicate is gone" in setup.text("waits_for_duplicate")
        assert session.execute(rescue(setup.model)).all()
        session.commit()
    assert setup.codes() == ["ready"]


def test_a_running_job(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", extra_columns=("started_at",)).with_job()
    with Session(engine) as session:
        [job] = claimed(session, setup.model)
        session.commit()
        name = job.claimed_by
    assert setup.codes() == ["running"]
    text = setup.text("running")
    assert f"It is running since {now():%Y-%m-%d}" in text
    assert f"claimed by {name}, with a lease until" in text
    assert "in 59 s" in text
    assert "No live Consumer has this name" in text
    setup.add_consumer(name)
    assert "That Consumer is alive, and had not called the handler" in setup.text("running")
    setup.execute("""UPDATE sqlaqueue_consumer SET running = '[["1"]]'""")
    assert f"The Consumer {name} was running its handler" in setup.text("running")


def test_an_expired_lease(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status").with_job()
    with Session(engine) as session, session.begin():
        claimed(session, setup.model)
    setup.execute("UPDATE job SET lease_expires_at = now() - interval '5 minutes', claimed_by = 'web:4'")
    assert setup.codes() == ["lease_expired"]
    text = setup.text("lease_expired")
    assert "The lease of web:4 expired at" in text
    assert "5 min" in text
    assert "no live Consumer is there to rescue it" in text
    setup.add_consumer("web:5")
    assert "one of the live Consumers (web:5) rescues it" in setup.text("lease_expired")


@pytest.mark.parametrize("kind", ["batch_select", "delete_returning"])
def test_a_status_that_the_strategy_never_writes(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind).with_job()
    setup.execute("UPDATE job SET status = 'processing'")
    assert setup.codes() == ["running"]
    assert f'which the strategy "{kind}" never writes' in setup.text("running")


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_an_unknown_status(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind).with_job()
    setup.execute("UPDATE job SET status = 'odd'")
    assert (setup.explain().state, setup.codes()) == ("other", ["unknown_status"])
    assert "Its status is 'odd', which is no status value" in setup.text("unknown_status")


def test_an_unknown_class(engine: sa.Engine, session: Session) -> None:
    animal, dog = make_animals()
    setup = Setup(engine, animal)
    setup.add(animal(id=1), dog(id=2))
    setup.add_consumer()
    assert setup.codes(1) == ["ready"]
    assert setup.codes(2) == ["jobs_before"]
    setup.execute("UPDATE animal SET kind = 'cat' WHERE id = 1")
    assert setup.codes(1) == ["unknown_class"]
    assert "Its kind is 'cat', which belongs to no class mapped" in setup.text("unknown_class")
    setup.execute("UPDATE animal SET kind = NULL WHERE id = 1")
    assert setup.codes(1) == ["ready"]
    # The job of a subclass, by the instance.
    assert QueueAdmin(session, animal).explain(session.get_one(animal, 2)).state == "pending"


def test_a_composite_key(engine: sa.Engine) -> None:
    row = make_rows()
    setup = Setup(engine, row)
    setup.add(row(year=1, name="a,b"), row(year=1, name="c"))
    setup.add_consumer()
    explanation = setup.explain((1, "a,b"))
    assert (explanation.key, [reason.code for reason in explanation.reasons]) == ((1, "a,b"), ["ready"])
    assert str(explanation).startswith('row 1,"a,b" is pending')
    assert setup.explain('1,"a,b"') == explanation
    assert setup.codes("1,c") == ["jobs_before"]
    with Session(engine) as worker:
        claimed(worker, row)
        assert setup.codes((1, "a,b")) == ["locked"]


def test_the_reasons_are_in_order(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "delete_returning").with_job(run_at=now() + HOUR)
    setup.execute("DELETE FROM sqlaqueue_message_job")
    with Session(engine) as session:
        QueueAdmin(session, setup.model).pause()
    assert setup.codes() == ["no_message", "paused", "not_due", "no_consumer"]


def test_the_session_is_not_flushed(engine: sa.Engine, session: Session) -> None:
    setup = Setup.of(engine, "update_status").with_job()
    job = session.get_one(setup.model, 1)
    job.note = "new"
    session.add(setup.model(id=2))
    QueueAdmin(session, setup.model).explain(job)
    assert session.dirty
    assert session.new


def test_wrong_arguments(engine: sa.Engine, session: Session) -> None:
    setup = Setup.of(engine, "update_status").with_job()
    admin = QueueAdmin(session, setup.model)
    with pytest.raises(NotAQueueError, match=r"explain\(\): this is of the class Row; use QueueAdmin\(session, Row\)"):
        admin.explain(make_rows()())
    job = setup.model(id=2)
    session.add(job)
    with pytest.raises(StatementError, match="this Job waits in a session to be inserted; flush"):
        admin.explain(job)


async def test_the_async_version(shared: Database, engine: sa.Engine) -> None:
    setup = Setup.of(engine, "batch_select").with_job()
    async_engine = create_async_engine(shared.url("asyncpg"))
    async with AsyncSession(async_engine) as session:
        explanation = await AsyncQueueAdmin(session, setup.model).explain(1)
        assert [reason.code for reason in explanation.reasons] == ["no_consumer"]
        job = await session.get_one(setup.model, 1)
        assert await AsyncQueueAdmin(session, setup.model).explain(job) == explanation
    await async_engine.dispose()


# -- jobs that other transactions hold, whose message is missing, or whose worker died ----------------------------


def test_a_locked_job(setup: Setup) -> None:
    """Whatever transaction has locked it; the explanation itself keeps no lock."""
    setup.add(setup.model(id=1))
    setup.add_consumer("web:1", claimed=2)
    with Session(setup.engine) as session, setup.engine.connect() as other:
        admin = QueueAdmin(session, setup.model)
        admin.explain(1)
        other.exec_driver_sql("SELECT FROM job WHERE id = 1 FOR UPDATE NOWAIT")
        [reason] = admin.explain(1).reasons
        assert reason.code == "locked"
        assert "(web:1 had claimed jobs that were not running" in reason.text
        other.rollback()
        assert admin.explain(1).reasons[0].code == "ready"


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_a_locked_message(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind).with_job()
    setup.add_consumer()
    table = "message" if kind == "existing_messages" else "sqlaqueue_message_job"
    with Session(engine) as session, engine.connect() as other:
        other.exec_driver_sql(f"SELECT FROM {table} FOR UPDATE")
        assert [reason.code for reason in QueueAdmin(session, setup.model).explain(1).reasons] == ["locked"]
        other.rollback()
        QueueAdmin(session, setup.model).explain(1)
        other.exec_driver_sql(f"SELECT FROM {table} FOR UPDATE NOWAIT")


@pytest.mark.parametrize("kind", HELD)
def test_a_job_that_runs_in_a_transaction(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind).with_job()
    with Session(engine) as worker:
        [job] = claimed(worker, setup.model)
        assert setup.codes() == ["locked"]
        assert "or that of a worker which has claimed it" in setup.text("locked")
        setup.add_consumer("web:7", running=[["1"]])
        assert setup.codes() == ["running"]
        assert "The Consumer web:7 runs it" in setup.text("running")
        if kind != "rows_are_messages":
            here = QueueAdmin(worker, setup.model).explain(job)
            assert [reason.code for reason in here.reasons] == ["running"]
            assert "The transaction of this session has claimed it" in here.reasons[0].text


def test_a_role_that_may_not_lock(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "batch_select").with_job()
    setup.add_consumer()
    with Session(engine) as session, engine.connect() as other:
        other.exec_driver_sql("SELECT FROM job FOR UPDATE")
        session.connection().exec_driver_sql("SET TRANSACTION READ ONLY")
        [reason] = QueueAdmin(session, setup.model).explain(1).reasons
        assert reason.code == "ready"
        assert "locked it is not known" in reason.text
        # The transaction is still usable.
        assert session.scalar(sa.select(1)) == 1
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        [reason] = QueueAdmin(session, setup.model).explain(1).reasons
        assert "locked it is not known" in reason.text


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_a_job_without_a_message(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind).with_job()
    setup.add_consumer()
    setup.execute(f"DELETE FROM {'message' if kind == 'existing_messages' else 'sqlaqueue_message_job'}")
    assert setup.codes() == ["no_message"]
    text = setup.text("no_message")
    assert ("reconcile(), which" if kind == "delete_returning" else "the application inserts") in text
    if kind == "delete_returning":
        with Session(engine) as session:
            assert QueueAdmin(session, setup.model).reconcile() == 1
        assert setup.codes() == ["ready"]


def test_a_quarantined_job_with_a_lease(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status").with_job()
    setup.add_consumer()
    with Session(engine) as session:
        claimed(session, setup.model)
        session.commit()
        setup.execute("UPDATE job SET lease_expires_at = now()")
        session.execute(rescue(setup.model)).all()
        session.commit()
    assert setup.codes() == ["quarantined"]


@pytest.mark.parametrize("kind", HELD)
def test_a_quarantined_job_in_the_crash_journal(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind).with_job()
    setup.add_consumer()
    journal = "INSERT INTO sqlaqueue_crash_journal (id, queue, keys, starts) VALUES (gen_random_uuid(), 'job', "
    setup.execute(journal + """'["2"]', 1)""")
    assert setup.codes() == ["ready"]
    setup.execute(journal + """'["1"]', 1)""")
    assert setup.codes() == ["quarantined"]
    # A running batch has written its keys as well.
    with Session(engine) as worker:
        claimed(worker, setup.model)
        assert setup.codes() == ["locked"]


# -- new instances: whether a duplicate keeps them from being enqueued -------------------------------------------------


def explain_new(setup: Setup, job: Any) -> tuple[str, str]:
    with Session(setup.engine) as session:
        explanation = QueueAdmin(session, setup.model).explain(job)
        assert job not in session
        assert (explanation.key, explanation.state) == (None, "new")
        [reason] = explanation.reasons
        return reason.code, reason.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_duplicate(engine: sa.Engine, session: Session, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=5, key="a"))
    code, text = explain_new(setup, setup.model(key="a"))
    assert code == "duplicate"
    assert text.startswith("Job 5 has key='a' as well and is pending, enqueued at ")
    code, text = explain_new(setup, setup.model(key="b"))
    assert code == "ready"
    assert "No job with key='b' counts" in text
    setup.add(setup.model(id=6, key=None))
    code, text = explain_new(setup, setup.model(key=None))
    assert code == "ready"
    assert "a None in key=None" in text
    # What it says is so.
    assert [one.created for one in enqueue(session, [setup.model(key="a"), setup.model(key="b")])] == [False, True]


def test_a_running_duplicate(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.add(setup.model(id=5, key="a"))
    with Session(engine) as session, session.begin():
        session.scalars(claim(setup.model, 1)).all()
    assert "is processing" in explain_new(setup, setup.model(key="a"))[1]


def test_nulls_that_do_not_differ(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=Unique("key", nulls_distinct=False))
    setup.add(setup.model(id=5))
    code, text = explain_new(setup, setup.model())
    assert (code, text[:22]) == ("duplicate", "Job 5 has key=None as ")


def test_a_period(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=Unique("key", within=timedelta(days=36500)))
    setup.add(setup.model(id=5, key="a"))
    job = setup.model(key="a")
    code, text = explain_new(setup, job)
    assert code == "duplicate"
    assert "or the period of 36500 days, 0:00:00 is over" in text
    # Nothing was set on the instance.
    assert "created_at" not in job.__dict__
    assert explain_new(setup, setup.model(key="a", created_at=datetime(1950, 1, 1, tzinfo=UTC)))[0] == "ready"


def test_a_queue_without_unique_jobs(engine: sa.Engine) -> None:
    row = make_rows()
    code, text = explain_new(Setup(engine, row), row(year=1, name="a"))
    assert code == "ready"
    assert "has no QueueConfig(unique=...)" in text


def test_defaults_and_relationships_count(engine: sa.Engine, session: Session) -> None:
    class Base(DeclarativeBase):
        pass

    class Customer(Base):
        __tablename__ = "customer"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Reminder(QueueMixin, Base):
        __tablename__ = "reminder"
        __queue__ = QueueConfig(unique=Unique("customer_id", "kind"))
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"))
        kind: Mapped[str] = mapped_column(default="invoice")
        customer: Mapped[Customer] = relationship()

    Base.metadata.create_all(engine)
    customer = Customer(id=7)
    session.add(customer)
    session.flush()
    session.add(Reminder(id=3, customer_id=7))
    session.commit()
    job = Reminder(customer=customer)
    [reason] = QueueAdmin(session, Reminder).explain(job).reasons
    assert reason.code == "duplicate"
    assert "Job 3 has customer_id=7, kind='invoice' as well" in reason.text
    assert "kind" not in job.__dict__
    assert list(session.new) == []


# -- one job that the database refuses to change keeps no other from being changed, and is named -------------------
N, BAD = 20, 7
CHECK = "ALTER TABLE job ADD CONSTRAINT good CHECK (id <> 7) NOT VALID"
DEFERRED = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE OR DELETE ON job DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (OLD.id = 7) EXECUTE FUNCTION refuse()
"""
REFERENCE = "CREATE TABLE child (job_id integer REFERENCES job (id)); INSERT INTO child VALUES (7)"
Job, Once = make_job(), make_job(unique=Unique("payload"))


@pytest.fixture
def filled(sessions: Any, model: type[Any]) -> Iterator[Session]:
    """A queue with jobs that wait."""
    with sessions(model)() as session:
        session.add_all([model(payload=str(n)) for n in range(N)])
        session.commit()
        yield session


CHANGES = {
    "requeue": ("status = 'failed'", CHECK, QueueAdmin.requeue),
    "cancel": ("status = 'pending'", CHECK, lambda admin: len(admin.cancel().cancelled)),
    "purge": ("status = 'completed', finished_at = now()", REFERENCE, QueueAdmin.purge),
    "rescue": ("status = 'processing', lease_expires_at = now() - interval '1 hour'", CHECK, QueueAdmin.rescue),
}


@pytest.mark.parametrize("model", [Job, Once], ids=["Job", "Once"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("deferred", [False, True])
def test_the_others_are_changed(filled: Session, model: type[Any], change: str, caplog: Any, *, deferred: bool) -> None:
    """A deferred constraint is checked at the commit, which would undo the changes of all."""
    state, refusal, function = CHANGES[change]
    filled.execute(sa.text(f"UPDATE job SET {state}"))
    filled.execute(sa.text(DEFERRED if deferred else refusal))
    filled.commit()
    before = filled.scalar(sa.text(f"SELECT status FROM job WHERE id = {BAD}"))
    assert function(QueueAdmin(filled, model)) == N - 1
    assert filled.scalar(sa.text(f"SELECT status FROM job WHERE id = {BAD}")) == before
    left = sa.text("SELECT count(*) FROM job WHERE status = :status")
    assert filled.scalar(left, {"status": before}) == 1
    named = [record.job_key for record in caplog.records if getattr(record, "event", None) == "change_refused"]
    assert named == [BAD]


@pytest.mark.parametrize("model", [Job], ids=["Job"])
def test_a_batch_of_one_is_one_of_many(filled: Session, caplog: Any) -> None:
    """Whether the refused job is alone in its batch is a matter of chance."""
    state, refusal, function = CHANGES["purge"]
    filled.execute(sa.text(f"UPDATE job SET {state}"))
    filled.execute(sa.text(refusal))
    filled.commit()
    assert function(QueueAdmin(filled, Job), batch_size=1) == N - 1
    assert [record.job_key for record in caplog.records if getattr(record, "event", None) == "change_refused"] == [BAD]


@pytest.mark.parametrize("model", [Job], ids=["Job"])
def test_a_job_that_is_changed_by_itself_raises_the_error(filled: Session) -> None:
    filled.execute(sa.text("UPDATE job SET status = 'failed'"))
    filled.execute(sa.text(CHECK))
    filled.commit()
    with pytest.raises(sa.exc.IntegrityError, match="good"):
        QueueAdmin(filled, Job).requeue(filled.get(Job, BAD))
