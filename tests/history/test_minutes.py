"""The statistics of a queue: what Consumers count, and write into the table of minutes."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Cancel, Constant, Consumer, Snooze, claim
from sqlaqueue.consumer.maintenance import minutes
from sqlaqueue.consumer.outcomes import COMPLETED, FinishedRun, MinuteCounts
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.side_tables import BOUNDS, COUNTED, ENDINGS, MEASURED, RUNS, WAITS
from sqlaqueue.queue.names import MINUTE
from sqlaqueue.queue.run import Run
from sqlaqueue.testing import drain
from tests.consumer.bench import Server
from tests.history.conftest import PAIRS
from tests.models import add_messages, execute, insert, make_job, sent_statements
from tests.models import shared as one_class
from tests.programs import wait_until
from tests.servers import Database
from tests.shared_database import each_engine

__all__ = ["each_engine"]

OPTIONS = {"statistics": True, "max_attempts": 2, "retry": Constant(0)}


@one_class
def make_model(kind: str = "update_status", **config: Any) -> Any:
    model = make_job(kind, **OPTIONS | config)
    if kind == "existing_messages":
        add_messages(model)
    return model


def created(engine: sa.Engine, model: Any) -> Any:
    model.metadata.create_all(engine)
    return model


def table_of(model: Any) -> sa.Table:
    table: sa.Table = model.metadata.tables[MINUTE]
    return table


def rows(engine: sa.Engine, model: Any) -> list[dict[str, Any]]:
    """Return the rows of minutes without what is NULL, in their order."""
    table = table_of(model)
    with engine.connect() as connection:
        found = connection.execute(sa.select(table).order_by(table.c.queue, table.c.minute)).mappings().all()
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def totals(engine: sa.Engine, model: Any) -> Counter[str]:
    total = Counter[str]()
    for row in rows(engine, model):
        total.update({name: row[name] for name in COUNTED if name in row})
    return total


def number(counted: Counter[str], names: tuple[str, ...]) -> int:
    return sum(counted[name] for name in names)


async def obey(io: Any, job: Any) -> None:
    end(job)


def end(job: Any) -> None:
    match job.payload:
        case "raise":
            raise ValueError("no address")
        case "cancel":
            raise Cancel("not wanted")
        case "snooze":
            raise Snooze(3600)


def settings_of(model: Any) -> ConsumerSettings:
    return Consumer(model, lambda session, job: None, sessionmaker()).settings


def consumer_of(engine: sa.Engine, model: Any, **options: Any) -> Consumer[Any]:
    return Consumer(model, lambda session, job: end(job), sessionmaker(engine), poll_interval=0.2, **options)


@contextmanager
def running(consumer: Consumer[Any]) -> Iterator[None]:
    thread = Thread(target=consumer.run, name="consumer")
    thread.start()
    try:
        yield
    finally:
        wait_until(lambda: consumer.running or not thread.is_alive(), "the start of a Consumer")
        consumer.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Consumers write ten times a second."""
    monkeypatch.setattr(minutes, "EVERY", 0.1)
    monkeypatch.setattr(minutes, "_EARLIEST", 0.0)
    monkeypatch.setattr(minutes, "_LATEST", 0.0)


PAYLOADS = ["write", "write", "write", "raise", "cancel", "snooze"]
ENDED = {"completed": 3, "retried": 1, "failed": 1, "cancelled": 1}


@pytest.mark.few(3)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_attempts_are_counted_by_outcome_and_time(database: Database, pair: tuple[str, str]) -> None:
    kind, api = pair
    model = make_model(kind)
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    created(engine, model)
    insert(engine, model, [{"payload": payload} for payload in PAYLOADS])
    Server(database, api, model, obey).drain()
    counted = totals(engine, model)
    assert {name: counted[name] for name in ENDINGS} == ENDED
    # What is released is no attempt. Each of the others has waited and run.
    assert number(counted, RUNS) == number(counted, WAITS) == sum(ENDED.values())
    assert {row["queue"] for row in rows(engine, model)} == {"job"}


@pytest.mark.few(2)
def test_attempts_are_counted_on_each_database(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    insert(each_engine, model, [{"payload": payload} for payload in PAYLOADS])
    consumer_of(each_engine, model).drain()
    counted = totals(each_engine, model)
    assert {name: counted[name] for name in ENDINGS} == ENDED
    assert number(counted, RUNS) == number(counted, WAITS) == sum(ENDED.values())


def test_a_wait_is_that_since_the_job_was_due(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    insert(each_engine, model, [{}, {}])
    past = datetime.now(UTC) - timedelta(seconds=200)
    for key, due in ((1, past), (2, past - timedelta(hours=5))):
        moved = sa.update(model.__table__).values(run_at=due, created_at=due)
        execute(each_engine, moved.where(model.__table__.c.id == key))
    consumer_of(each_engine, model).drain()
    counted = totals(each_engine, model)
    waited = {f"wait_{place}": 1 for place, bound in enumerate(BOUNDS) if bound in {300, 86400}}
    assert {name: counted[name] for name in WAITS if counted[name]} == waited


def test_a_run_is_counted_by_how_long_it_took() -> None:
    counts = MinuteCounts()
    for seconds in (0.001, 0.002, 0.0021, 100_000):
        run = _run(seconds, due=0.0)
        counts.add([_finished(run)])
    values = {name: value for name, value in counts.values().items() if value}
    # An upper bound belongs to its class, and the last class has none.
    assert values == {"completed": 4, "run_0": 2, "run_1": 1, f"run_{len(BOUNDS)}": 1, "wait_0": 4}


def _run(seconds: float, due: float) -> Any:
    run = Run((1,), None, 1, 1)
    run.handler_started_at, run.duration, run.due_at = due, seconds, due
    return run


def _finished(run: Any) -> Any:
    return FinishedRun(run, COMPLETED)


@pytest.mark.usefixtures("often")
def test_a_running_consumer_writes_counts_and_depth(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    later = datetime.now(UTC) + timedelta(hours=1)
    insert(each_engine, model, [{"payload": "write"}, {"payload": "raise"}, {"run_at": later}])
    with running(consumer_of(each_engine, model)):
        wait_until(lambda: totals(each_engine, model)["failed"] == 1, "the counts")
        # Without any job, a row says that a Consumer runs.
        last = rows(each_engine, model)[-1]
    assert (last["pending"] >= 1, "due" in last) == (True, True)
    counted = totals(each_engine, model)
    assert {name: counted[name] for name in ENDINGS} == {"completed": 1, "retried": 1, "failed": 1, "cancelled": 0}


def test_the_depth_is_that_of_the_queue(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    moment = datetime.now(UTC)
    times = [moment - timedelta(minutes=10), moment - timedelta(minutes=5), moment + timedelta(hours=1)]
    insert(each_engine, model, [{"run_at": each, "created_at": each} for each in times])
    settings = settings_of(model)
    with Session(each_engine) as session:
        depth = minutes.measure(session, settings, time.monotonic())
        assert (depth["pending"], depth["due"]) == (3, 2)
        assert depth["oldest_due"] == pytest.approx(600, abs=60)
        minutes.write_minute(session, settings, MinuteCounts(), depth)
        # Another Consumer has measured in this minute, unless the next one has begun.
        again = minutes.measure(session, settings, time.monotonic())
        assert again == {} or len(rows(each_engine, model)) == 1


def test_the_depth_is_counted_up_to_a_limit(each_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minutes, "DEPTH_LIMIT", 5)
    model = created(each_engine, make_model())
    insert(each_engine, model, 8)
    with Session(each_engine) as session:
        depth = minutes.measure(session, settings_of(model), time.monotonic())
    assert (depth["pending"], depth["due"]) == (5, 5)


def counts_of(**columns: int) -> MinuteCounts:
    counts = MinuteCounts()
    counts.add_rescued(retried=columns.get("retried", 0), failed=columns.get("failed", 0))
    return counts


def test_consumers_add_to_one_row_of_a_minute(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    settings = settings_of(model)
    depths: list[dict[str, int | None]] = [
        {},
        {"pending": 4, "due": 2, "oldest_due": 9},
        {"pending": 3, "due": 3, "oldest_due": None},
    ]
    with Session(each_engine) as session:
        for depth in depths:
            minutes.write_minute(session, settings, counts_of(retried=2, failed=1), depth)
    counted = totals(each_engine, model)
    assert (counted["retried"], counted["failed"]) == (6, 3)
    found = rows(each_engine, model)
    if len(found) == 1:  # unless a minute has ended meanwhile
        # The highest of each.
        assert [found[0][name] for name in MEASURED] == [4, 3, 9]


def test_counts_belong_to_the_minute_that_has_most_of_their_time(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    counts = counts_of(failed=1)
    counts.since = time.monotonic() - 600
    with Session(each_engine) as session:
        now = minutes.write_minute(session, settings_of(model), counts, {})
    assert [row["minute"] for row in rows(each_engine, model)] == [int((now - 300) // 60)]
    assert now == pytest.approx(time.time(), abs=60)


@pytest.mark.few(1)
def test_old_minutes_are_deleted_in_pieces(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    table, settings = table_of(model), settings_of(model)
    now = int(time.time() // 60)
    first = now - minutes.KEPT - 2 * minutes.PIECE
    old = [{"queue": queue, "minute": each} for queue in ("job", "other") for each in range(first, now, 60)]
    with each_engine.begin() as connection:
        connection.execute(sa.insert(table), old)
    left = []
    with Session(each_engine) as session:
        for _ in range(4):
            minutes.measure(session, settings, time.monotonic())
            left.append(Counter(row["queue"] for row in rows(each_engine, model)))
    # A day's rows by each transaction, until none is older than 31 days; those of another queue stay.
    first, *others = [before["job"] - after["job"] for before, after in itertools.pairwise(left)]
    # One more becomes old enough if a minute ends meanwhile.
    assert (first, sum(others) <= 1) == (24, True)
    assert left[0]["job"] == len(old) // 2 - 24
    assert left[-1]["other"] == len(old) // 2
    assert min(row["minute"] for row in rows(each_engine, model) if row["queue"] == "job") >= now - minutes.KEPT


@pytest.mark.few(1)
@pytest.mark.usefixtures("often")
def test_rescued_attempts_are_counted(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model(lease=1))
    insert(each_engine, model, [{"payload": "write"}])
    with Session(each_engine) as session:
        assert len(session.scalars(claim(model, 1)).all()) == 1
        session.commit()
    execute(each_engine, sa.update(model.__table__).values(lease_expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    with running(consumer_of(each_engine, model)):
        wait_until(lambda: totals(each_engine, model)["completed"] == 1, "the job")
    assert totals(each_engine, model)["retried"] == 1


def drained(engine: sa.Engine, model: Any, jobs: int = 60) -> Counter[str]:
    """Return the statements of a drain, and how often each was sent."""
    created(engine, model)
    insert(engine, model, [{"payload": "raise" if number % 10 == 0 else "write"} for number in range(jobs)])
    with sent_statements(engine) as sent:
        consumer_of(engine, model).drain()
    return Counter(statement for statement, _ in sent)


def is_of_statistics(statement: str) -> bool:
    return MINUTE in statement or "sqlaqueue_counted_due" in statement


@pytest.mark.parametrize("kind", ["update_status", "batch_select", "delete_returning"])
def test_no_statement_of_a_job_changes(database: Database, kind: str) -> None:
    sent: dict[bool, Counter[str]] = {}
    for statistics in (False, True):
        engine = sa.create_engine(database.url())
        model = make_job(kind, statistics=statistics, max_attempts=2, retry=Constant(0))
        sent[statistics] = drained(engine, model)
        assert execute(engine, "SELECT count(*) FROM job WHERE status = 'completed'") == 54
        model.metadata.drop_all(engine)
        engine.dispose()
    assert not any(map(is_of_statistics, sent[False]))
    # All others are those of a queue without, to the last character; some depend on when an idle moment comes.
    changing = {
        flag: {each for each in found if not each.startswith("SELECT") and not is_of_statistics(each)}
        for flag, found in sent.items()
    }
    assert changing[True] == changing[False]
    assert any("job" in each for each in changing[True])
    # The depth at the start of the run and the counts at its end, however many jobs there are.
    writes = sum(times for each, times in sent[True].items() if each.startswith(f"INSERT INTO {MINUTE}"))
    assert 1 <= writes <= 3


@pytest.mark.few(1)
def test_a_queue_without_statistics_has_nothing_of_them(each_engine: sa.Engine) -> None:
    model = make_job(max_attempts=2, retry=Constant(0))
    assert MINUTE not in model.metadata.tables
    assert MINUTE not in spec_of(model).side_tables
    assert not any(map(is_of_statistics, drained(each_engine, model)))
    consumer = consumer_of(each_engine, model)
    seen: list[Any] = []
    consumer.on("completed", lambda _: seen.append(consumer._context and consumer._context.counts))
    insert(each_engine, model, [{}])
    consumer.drain()
    assert seen == [None]


def test_jobs_of_a_test_are_not_counted(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    with Session(each_engine) as session:
        session.add(model())
        assert drain(session, model, lambda session, job: None) == 1
        session.commit()
    assert rows(each_engine, model) == []


def test_a_consumer_does_not_start_without_its_table(each_engine: sa.Engine) -> None:
    model = created(each_engine, make_model())
    execute(each_engine, f"DROP TABLE {MINUTE}")
    with pytest.raises(DatabaseNotReadyError, match=MINUTE):
        consumer_of(each_engine, model).drain()


REFUSE = (
    "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no statistics today''; END'",
    "CREATE TRIGGER refuse BEFORE INSERT ON sqlaqueue_minute FOR EACH ROW EXECUTE FUNCTION refuse()",
)


def test_jobs_end_although_nothing_can_be_counted(database: Database, log: pytest.LogCaptureFixture) -> None:
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    model = created(engine, make_model())
    for statement in REFUSE:
        execute(engine, statement)
    insert(engine, model, [{"payload": "write"}] * 3)
    assert consumer_of(engine, model).drain() == 3
    assert rows(engine, model) == []
    assert any("no statistics today" in each.getMessage() for each in log.records if each.levelno == logging.WARNING)
    # It is no error of a settlement.
    assert not any("could not settle" in each.getMessage() for each in log.records)


@pytest.mark.usefixtures("often")
def test_what_could_not_be_written_is_written_later(database: Database, log: pytest.LogCaptureFixture) -> None:
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    model = created(engine, make_model())
    for statement in REFUSE:
        execute(engine, statement)
    insert(engine, model, [{"payload": "write"}] * 3)

    def has_failed() -> bool:
        jobs = execute(engine, "SELECT count(*) FROM job WHERE status = 'completed'")
        failures = [each for each in log.records if "no statistics today" in each.getMessage()]
        return bool(jobs == 3 and len(failures) > failed_before)

    failed_before = 0
    with running(consumer_of(engine, model)):
        wait_until(has_failed, "a failure after all jobs have ended")
        failed_before = sum("no statistics today" in each.getMessage() for each in log.records) + 1
        wait_until(has_failed, "two more failures")
        execute(engine, "DROP TRIGGER refuse ON sqlaqueue_minute")
        wait_until(lambda: totals(engine, model)["completed"] == 3, "the counts")
    # Once.
    counted = totals(engine, model)
    assert (counted["completed"], number(counted, RUNS), number(counted, WAITS)) == (3, 3, 3)


@pytest.mark.usefixtures("often")
def test_a_depth_that_cannot_be_measured_costs_no_counts(
    database: Database, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        zero: Any = sa.select(sa.literal_column("1 / 0").label("due"), sa.literal_column("0").label("age")).subquery()
        return sa.literal_column("0").label("pending"), zero

    monkeypatch.setattr(minutes, "count_waiting", failing)
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    model = created(engine, make_model())
    insert(engine, model, [{"payload": "write"}] * 3)
    with running(consumer_of(engine, model)):
        wait_until(lambda: totals(engine, model)["completed"] == 3, "the counts")
    assert any("division by zero" in each.getMessage() for each in log.records)
    assert not any("pending" in row for row in rows(engine, model))
