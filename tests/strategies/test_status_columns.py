"""Each kind of status column that a queue may have, and a walk through every statement that reads or writes one."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column
from sqlalchemy.pool import NullPool

from sqlaqueue import (
    QueueConfig,
    QueueMixin,
    States,
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.admin import JobFilter, QueueAdmin
from sqlaqueue.admin.changes import cancel_some, in_batches, purge_some, requeue_some
from sqlaqueue.consumer import executor
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.consumer.maintenance.cleanup import reconcile_at_once, reconcile_range
from sqlaqueue.consumer.maintenance.handlers_running import take_requests
from sqlaqueue.consumer.maintenance.leases import rescue_jobs
from sqlaqueue.consumer.maintenance.state import Retention
from sqlaqueue.consumer.outcomes import COMPLETED, RELEASED, FinishedRun
from sqlaqueue.consumer.worker import check_database
from sqlaqueue.exc import Retry
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.strategies.existing_messages import ExistingMessages
from sqlaqueue.waiting import wait
from tests.contexts import make_context
from tests.mapping.conftest import PHASES, Letter, Phase
from tests.models import shared
from tests.servers import Server

STRATEGIES = ("update_status", "batch_select", "delete_returning", "existing_messages")


NUMBERS = States(pending=0, processing=1, completed=2, failed=-1, cancelled=-2)
WORDS = tuple(word for _, word in States().items())


class Word(sa.types.TypeDecorator[str]):
    """An application's own type over an enum of the database."""

    impl = sa.Enum(*WORDS, name="decorated")
    cache_ok = True


class Domain(sa.types.UserDefinedType[str]):
    """A domain, which the database has already: a comparison of an enum's domain with a literal it refuses."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "some_word"

    def literal_processor(self, dialect: sa.Dialect) -> Callable[[str], str]:
        return "'{}'".format


DOMAIN = "CREATE DOMAIN some_word AS text CHECK (value <> '')"
KINDS: dict[str, tuple[States, Callable[[], Any]]] = {
    "text": (States(), sa.Text),
    "varchar": (States(), lambda: sa.String(20)),
    "smallint": (NUMBERS, sa.SmallInteger),
    "integer": (NUMBERS, sa.Integer),
    "enum": (PHASES, lambda: sa.Enum(Phase)),
    "enum_of_words": (States(), lambda: postgresql.ENUM(*WORDS, name="Word")),
    "enum_elsewhere": (PHASES, lambda: sa.Enum(Phase, schema="Else where")),
    "enum_in_a_string": (PHASES, lambda: sa.Enum(Phase, native_enum=False)),
    "decorated": (PHASES, Letter),
    "decorated_enum": (States(), Word),
    "domain": (States(), Domain),
}


@dataclass(frozen=True)
class Model:
    job: type[Any]
    note: type[Any] | None
    """The class of its messages, where the application has those."""
    states: dict[str, str]
    """The states by the words that the database has for them."""


@shared
def make_model(kind: str, strategy: str) -> Model:
    class Base(DeclarativeBase):
        pass

    states, make_type = KINDS[kind]
    type_ = make_type()
    note: type[Any] | None = None
    chosen: Any = strategy
    columns: dict[str, str | None] = {"status": "status", "last_error": "error"}
    if strategy == "existing_messages":
        body = {
            "__tablename__": "note",
            "id": mapped_column(sa.Integer, primary_key=True),
            "about": mapped_column(sa.Integer, nullable=False),
            "state": mapped_column(type_, nullable=False, default=states.pending),
        }
        note = type("Note", (Base,), body)
        chosen = ExistingMessages(note, job="about", waiting={"state": states.pending})
        columns["priority"] = None
    body = {
        "__tablename__": "job",
        "__queue__": QueueConfig(
            strategy=chosen, states=states, columns=columns, max_attempts=1, retention={"completed": 60, "failed": 60}
        ),
        "id": mapped_column(sa.Integer, primary_key=True),
        "status": mapped_column(type_, nullable=False, default=states.pending),
        # Shorter than what a rescue writes into it.
        "error": mapped_column(sa.String(20)),
    }
    job = type("Job", (QueueMixin, Base), body)
    words = {literal_text(word, type_).strip("'"): state for state, word in states.items() if state != "waiting"}
    return Model(job, note, words)


# -- all statements of applications, Consumers and operators, with each kind of status column and each driver ----------

DRIVERS = ("psycopg", "asyncpg", "psycopg2")


class Walk:
    """Jobs of one model in one session, by their status values in the database."""

    def __init__(self, session: Session, model: Model) -> None:
        self.session, self.model, self.job = session, model, model.job
        self.spec = spec_of(model.job)
        self.leased = not self.spec.strategy.holds_transaction

    def add(self, number: int) -> None:
        jobs = [self.job() for _ in range(number)]
        self.session.add_all(jobs)
        self.session.flush()
        if self.model.note is not None:
            self.session.add_all([self.model.note(about=job.id) for job in jobs])
        self.session.commit()

    def claim(self, number: int) -> list[Any]:
        jobs = list(self.session.scalars(claim(self.job, number)).all())
        assert len(jobs) == number
        assert {job.status for job in jobs} == {self.spec.config.states.processing}
        return jobs

    def do(self, verb: Any) -> int:
        """Execute a verb, commit, and return how many keys came back."""
        keys = self.session.scalars(verb).all()
        self.session.commit()
        return len(keys)

    def states(self) -> Counter[str]:
        found = self.session.execute(sa.text(f'SELECT status::text FROM "{self.spec.table.name}"')).scalars()
        states = Counter(self.model.states[word] for word in found)
        self.session.rollback()
        return states

    def clear(self) -> None:
        tables = [self.spec.table, *([self.model.note.__table__] if self.model.note else [])]
        for table in tables:
            self.session.execute(sa.delete(table))
        self.session.commit()

    def expire(self, jobs: list[Any]) -> None:
        self.do(extend(jobs, lease=0))


def verbs(walk: Walk) -> None:
    walk.add(5)
    done, again, failed, released, extended = walk.claim(5)
    for verb in (
        complete(done),
        retry(again, error="once more"),
        fail([failed], error=ValueError("no")),
        release(released),
        extend(extended, lease=60),
    ):
        assert len(walk.session.scalars(verb).all()) == 1
    assert len(walk.session.scalars(release(extended)).all()) == 1
    walk.session.commit()
    assert walk.states() == Counter(pending=3, completed=1, failed=1)
    assert walk.do(cancel(walk.job)) == 3
    assert walk.states() == Counter(cancelled=3, completed=1, failed=1)
    assert walk.do(requeue(sa.select(walk.job).where(walk.job.id == failed.id))) == 1
    assert len(walk.session.scalars(claim(sa.select(walk.job).where(walk.job.id == failed.id), 5)).all()) == 1
    walk.session.rollback()
    assert walk.do(purge(walk.job, older_than=0, states=["cancelled", "completed"])) == 4
    assert walk.states() == Counter(pending=1)
    # The messages of jobs that were cancelled.
    assert walk.do(reconcile(walk.job)) == (0 if walk.model.note is None else 3)


def rescuing(walk: Walk) -> None:
    """Rescue sets jobs that ran together to pending, and one that ran alone without attempts left to failed."""
    if not walk.leased:
        assert walk.do(rescue(walk.job)) == 0
        return
    walk.add(3)
    together = walk.claim(2)
    walk.expire(together)
    assert walk.do(rescue(walk.job)) == 2
    assert walk.states() == Counter(pending=3)
    walk.do(cancel(together))
    alone = walk.claim(1)
    walk.expire(alone)
    assert walk.do(rescue(walk.job)) == 1
    assert walk.states() == Counter(cancelled=2, failed=1)


def serving(walk: Walk) -> None:
    """Execute the statements of a Consumer in turn."""
    session, spec = walk.session, walk.spec
    context = make_context(walk.job)
    claimer, settler = context.claimer, context.settler
    walk.add(6)
    check_database(session, context)
    beat = leases.SentHeartbeat(
        listening=True, running=(), waiting=0, unclaimable=(), failing=None, expires_in=30.0, notify=True
    )
    leases.send_heartbeat(session, context, beat)
    assert leases.upcoming_times(session, context, 5) == []
    reconcile_at_once(session, context)
    reconcile_range(session, context, None)
    rescue_jobs(session, context)

    jobs = claimer.claim(session, 2)[0]
    runs = [run for job in jobs if (run := run_of(job))]
    assert len(runs) == 2
    if walk.leased:
        session.commit()
        leases.extend_leases(session, context, runs)
        take_requests(session, context, runs)
        session.expunge_all()
        jobs = executor.load_again(session, context, runs)
        assert len(jobs) == 2
        session.add_all(jobs)
    executor.reload(session, context, jobs)
    succeeded = [FinishedRun(run, COMPLETED, job) for run, job in zip(runs, jobs, strict=True)]
    assert settler.settle_and_commit(session, succeeded) == []
    assert walk.states() == Counter(pending=4, completed=2)

    for error in (ValueError("no"), Retry(0), None):
        jobs = claimer.claim(session, 1)[0]
        (run,) = [run for job in jobs if (run := run_of(job))]
        outcome = RELEASED if error is None else context.outcome_rules.outcome(error, run)
        assert settler.settle_and_commit(session, [FinishedRun(run, outcome, jobs[0])]) == []
    assert walk.states() == Counter(pending=2, completed=2, failed=2)
    caller = wait.Waiter("wait", walk.job, runs[0].key, 5, lambda: None, check=True)
    wait.first_poll(session, caller)
    result = caller.result(caller.key)
    assert (result.state, result.job.status) == ("completed", spec.config.states.completed)
    deletes_old(walk, context)


def deletes_old(walk: Walk, context: Any) -> None:
    session = walk.session
    retention = Retention(walk.spec)
    assert retention.inspect(session, context.settings)
    for each in retention.walks:
        retention.warn_of_references(session, context.settings, each)
        assert retention.delete_batch(session, context.settings, each).number == 0
        each.age = timedelta(0)
        assert not retention.skip_first(session, context.settings, each, sa.exc.DBAPIError("", {}, ValueError("held")))
        each.skipped.clear()
        assert retention.delete_batch(session, context.settings, each).number == 2
    assert walk.states() == Counter(pending=2)


def operating(walk: Walk) -> None:
    session, job = walk.session, walk.job
    walk.add(3)
    walk.do(fail(walk.claim(1), error="KeyError: x"))
    admin = QueueAdmin(session, job)
    assert admin.stats().states == {
        "pending": 2,
        "processing": 0,
        "completed": 0,
        "failed": 1,
        "cancelled": 0,
    }
    assert admin.stats(finished=False).due == 2
    assert [group.kind for group in admin.failures()] == ["KeyError"]
    failed = JobFilter(states=("failed",), error="KeyError")
    assert admin.count(failed) == {"failed": 1}
    assert list(in_batches(session, job, failed, requeue_some)) == [1]
    waits = JobFilter(states=("pending",))
    assert list(in_batches(session, job, waits, cancel_some)) == [3]
    assert list(in_batches(session, job, JobFilter(), purge_some)) == [3]


PARTS: tuple[Callable[[Walk], None], ...] = (verbs, rescuing, serving, operating)


def walk_through(session: Session, model: Model) -> None:
    metadata = model.job.metadata
    metadata.create_all(session.connection())
    session.commit()
    try:
        walk = Walk(session, model)
        for part in PARTS:
            part(walk)
            walk.clear()
    finally:
        session.rollback()
        metadata.drop_all(session.connection())
        session.commit()


@pytest.fixture(scope="module")
def urls(server: Server) -> Iterator[dict[str, str]]:
    with server.database() as database:
        with database.connect() as connection:
            connection.execute('CREATE SCHEMA "Else where"')
            connection.execute(DOMAIN)
        yield {driver: database.url(driver) for driver in DRIVERS}


def cells() -> Iterator[Any]:
    """Yield kind, strategy and driver.

    A native enum meets each driver and each strategy, the other kinds the statements of leases by one driver; the rest
    is left to the session that runs everything.
    """
    for row, kind in enumerate(KINDS):
        for strategy in STRATEGIES:
            for column, driver in enumerate(DRIVERS):
                leased, mine = strategy == "update_status", row % len(DRIVERS) == column
                chosen = (leased or mine) if kind == "enum" else (leased and mine)
                marks = () if chosen else (pytest.mark.thorough,)
                yield pytest.param(kind, strategy, driver, marks=marks, id=f"{kind}-{strategy}-{driver}")


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "strategy", "driver"), [*cells()])
async def test_every_statement(urls: dict[str, str], kind: str, strategy: str, driver: str) -> None:
    model = make_model(kind, strategy)
    if driver == "asyncpg":
        async_engine = create_async_engine(urls[driver], poolclass=NullPool)
        async with AsyncSession(async_engine) as session:
            await session.run_sync(walk_through, model)
        return
    with Session(sa.create_engine(urls[driver], poolclass=NullPool)) as sync_session:
        walk_through(sync_session, model)
