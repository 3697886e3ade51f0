"""The events of jobs, for event listeners and in the log, and the other records of a worker."""

import ast
import contextlib
import errno
import json
import logging
import math
import threading
import time
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

import sqlaqueue
from sqlaqueue import Cancel, Fail, JobEvent, Retry, Snooze
from sqlaqueue import log as library_log
from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.consumer.core import events
from sqlaqueue.consumer.pace import FailuresInARow
from sqlaqueue.consumer.threads import GracePeriod
from sqlaqueue.exc import ConfigurationError, HandlerNotStopped
from sqlaqueue.log import FIELDS, JobLogFilter, JSONFormatter, database_text, fields
from tests.consumer.bench import Bench, Gate, for_some, logged
from tests.consumer.models import DEADLINE, models
from tests.contexts import make_context
from tests.programs import wait_until

ENDS: dict[str, tuple[str, Any]] = {
    "good": ("completed", None),
    "retry": ("retried", Retry(3600, error="later")),
    "error": ("retried", ValueError("an error")),
    "fail": ("failed", Fail("for good")),
    "cancel": ("cancelled", Cancel("not needed")),
    "snooze": ("released", Snooze(1800)),
}


async def end(io: Any, job: Any) -> None:
    """Settle the run as the job's payload says."""
    _, error = ENDS[job.payload]
    if error is not None:
        raise error


def test_each_outcome_has_an_event(bench: Bench) -> None:
    keys = {payload: bench.enqueue(1, payload=payload)[0] for payload in ENDS}
    server = bench.consumer(end, retry=lambda *_: 7200)
    server.drain()
    for payload, (name, error) in ENDS.items():
        claimed, ended = [event for event in server.events if event.key == (keys[payload],)]
        assert (claimed.name, ended.name) == ("claimed", name)
        assert ended.queue == claimed.queue == "job"
        assert ended.attempt == claimed.attempt == 1
        assert ended.error is error
    delays = {event.key[0]: event.delay for event in server.events if event.delay is not None}
    assert delays == {keys["retry"]: 3600, keys["error"]: 7200, keys["snooze"]: 1800}


def test_an_event_follows_the_commit(bench: Bench) -> None:
    """Other transactions see the change."""
    keys = {payload: bench.enqueue(1, payload=payload)[0] for payload in ENDS}
    seen: dict[int, tuple[str, str]] = {}
    server = bench.consumer(end, retry=lambda *_: 7200)

    def look(event: JobEvent) -> None:
        seen[event.key[0]] = (event.name, bench.row(event.key[0]).status)

    for name in ("completed", "retried", "failed", "cancelled", "released"):
        server.consumer.on(name, look)
    server.drain()
    states = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}
    assert seen == {keys[payload]: (name, states.get(name, "pending")) for payload, (name, _) in ENDS.items()}


def test_events_have_the_number_of_the_attempt(bench: Bench) -> None:
    [key] = bench.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        raise ValueError

    server = bench.consumer(work)
    server.drain()
    told = [(event.name, event.attempt) for event in server.events]
    assert told == [("claimed", 1), ("retried", 1), ("claimed", 2), ("retried", 2), ("claimed", 3), ("failed", 3)]
    assert bench.row(key).attempts == 3


@pytest.mark.parametrize("error", [ValueError("in a listener"), SystemExit(1), KeyboardInterrupt()])
def test_an_event_listener_that_raises_changes_nothing(bench: Bench, error: BaseException, log: Any) -> None:
    bench.enqueue(5)
    server = bench.consumer(concurrency=2)

    def fail(event: JobEvent) -> None:
        raise error

    for name in ("claimed", "completed"):
        server.consumer.on(name, fail)
    assert server.drain() == 5
    assert bench.states() == {"completed": 5}
    assert log.text.count("an event listener for 'completed' failed") == 5
    bench.assert_tidy()


def test_an_unknown_event_is_refused(leased: Bench) -> None:
    with pytest.raises(ConfigurationError, match=r"'finished'.*claimed, completed"):
        leased.consumer().consumer.on("finished", print)


def test_the_log_names_the_jobs(bench: Bench, log: Any) -> None:
    keys = {payload: bench.enqueue(1, payload=payload)[0] for payload in ENDS}
    bench.consumer(end, retry=lambda *_: 7200).drain()
    lines = {record.getMessage(): record for record in log.records}
    [completed] = [line for line in lines if line.startswith(f"queue job: job {keys['good']}: completed in ")]
    assert lines[completed].levelno == logging.DEBUG
    [retried] = [line for line in lines if "ValueError: an error" in line]
    assert retried == (
        f"queue job: job {keys['error']}: attempt 1 of 3 failed, next try in 7200 s: ValueError: an error"
    )
    assert lines[retried].levelno == logging.WARNING
    failed = lines[f"queue job: job {keys['fail']}: attempt 1 of 3 failed, no further try: Fail: for good"]
    assert failed.levelno == logging.ERROR
    assert {record.name for record in log.records} <= {"sqlaqueue", "asyncio"}


def test_a_rescue_and_a_refusal_are_told(leased: Bench, frequent_rescues: None, log: Any) -> None:
    [key] = leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        if job.attempts == 1:
            leased.execute("UPDATE job SET lease_expires_at = clock_timestamp() - interval '1 s'")
            with leased.consumer().running() as thief:
                wait_until(lambda: leased.states() == {"completed": 1})
            assert thief.told("rescued", "completed") == [key, key]

    server = leased.consumer(work)
    server.drain()
    assert server.told("lease_lost") == [key]
    assert f"queue job: job {key}: rescued: its lease expired" in log.text
    assert f"queue job: job {key}: the result of attempt 1 of 3 is refused" in log.text
    assert "None" not in log.text


# -- the log records of a worker: its start, each failure, its shutdown, and the fields of each record -------------


async def fail(io: Any, job: Any) -> None:
    """Raise an error whose traceback names this function."""
    raise ValueError(job.payload)


def test_the_start_is_logged_with_queue_database_and_mode(mixed: Bench, log: Any) -> None:
    with mixed.consumer(concurrency=2).running():
        wait_until(lambda: logged(log, "consumer_started"))
    [record] = logged(log, "consumer_started")
    text = record.getMessage()
    kind = "threads" if mixed.api == "sync" else "tasks"
    assert text.startswith(f"queue job: started, {mixed.strategy}, works on database {mixed.database.name} at ")
    assert text.endswith(f"with 2 worker {kind}, listening for notifications, polling every 0.2 s")
    assert (record.levelno, record.concurrency, record.mode) == (logging.INFO, 2, "listening")


def test_without_triggers_the_logged_mode_is_polling(leased: Bench, log: Any) -> None:
    """The triggers in the database decide, not the model."""
    leased.execute("ALTER TABLE job DISABLE TRIGGER USER")
    try:
        with leased.consumer().running():
            wait_until(lambda: logged(log, "consumer_started"))
    finally:
        leased.execute("ALTER TABLE job ENABLE TRIGGER USER")
    [record] = logged(log, "consumer_started")
    assert record.mode == "polling"
    assert record.getMessage().endswith(", polling every 0.2 s")
    assert "listening" not in record.getMessage()


@pytest.mark.once
def test_the_log_contains_no_password() -> None:
    engine = sa.create_engine("postgresql+psycopg://me:hush@db.example.com:5433/app")
    assert database_text(engine) == "database app at db.example.com:5433"


def test_each_failed_attempt_has_one_record_with_its_traceback(mixed: Bench, log: Any) -> None:
    keys = mixed.enqueue(20, payload="a\nb", max_attempts=2)
    server = mixed.consumer(fail, retry=lambda *_: 0)
    server.drain()
    loud = [record for record in log.records if record.levelno >= logging.WARNING]
    assert sorted((record.event, record.job_key, record.attempt) for record in loud) == sorted(
        [("retried", key, 1) for key in keys] + [("failed", key, 2) for key in keys]
    )
    retried, failed = logged(log, "retried")[0], logged(log, "failed")[0]
    key = retried.job_key
    assert retried.getMessage() == f"queue job: job {key}: attempt 1 of 2 failed, next try immediately: ValueError: a"
    assert failed.getMessage().endswith("attempt 2 of 2 failed, no further try: ValueError: a")
    for record in (retried, failed):
        assert (record.queue, record.max_attempts, record.error_kind) == ("job", 2, "ValueError")
        assert record.worker == server.consumer._settings.worker()
        assert record.duration >= 0
        assert "in fail\n" in logging.Formatter().format(record)


def test_an_event_has_the_time_and_duration_of_the_handler(mixed: Bench) -> None:
    good, bad = mixed.enqueue(1, payload="good"), mixed.enqueue(1, payload="bad")

    async def work(io: Any, job: Any) -> None:
        if job.payload == "bad":
            time.sleep(0.05)  # noqa: ASYNC251 - nothing else is to go on meanwhile
            raise Fail("order 1: no stock", kind="no_stock")

    before = datetime.now(UTC)
    server = mixed.consumer(work, batch_size=2)
    server.drain()
    ended = {event.key[0]: event for event in server.events if event.name != "claimed"}
    for key in (*good, *bad):
        event = ended[key]
        assert event.started_at is not None
        assert event.duration is not None
        assert before - timedelta(seconds=1) <= event.started_at <= datetime.now(UTC)
        assert event.duration >= 0
        assert event.max_attempts == 3
    first, second = ended[good[0]], ended[bad[0]]
    assert first.started_at is not None
    assert first.duration is not None
    assert second.started_at is not None
    assert first.started_at + timedelta(seconds=first.duration - 0.02) <= second.started_at, "the call, not the run"
    error = second.error
    assert error is not None
    assert error.__traceback__ is not None
    assert {(event.started_at, event.duration) for event in server.events if event.name == "claimed"} == {(None, None)}


def test_the_shutdown_counts_its_jobs(mixed: Bench, log: Any) -> None:
    mixed.enqueue(5)
    # A retry is a run that has ended, not a job that is finished.
    gate = Gate(Retry(3600))
    with mixed.consumer(gate, batch_size=5, grace=20).running() as server:
        gate.await_call()
        server.stop()
        wait_until(lambda: logged(log, "shutdown_started"))
        gate.open()
    [began], [stopped] = logged(log, "shutdown_started"), logged(log, "consumer_stopped")
    # How many a claim with leases takes is the Consumer's decision.
    waiting = began.waiting if mixed.strategy == "update_status" else 4
    jobs = f"{waiting} job{'s' * (waiting != 1)}"
    assert began.getMessage() == (
        f"queue job: stop requested: stopping, 1 running job to finish within 20 s, {jobs} to release"
    )
    assert (began.running, began.waiting, began.grace, began.signal) == (1, waiting, 20, None)
    be = "was" if waiting == 1 else "were"
    assert stopped.getMessage() == f"queue job: stopped; during the stop 1 run ended, and {jobs} {be} released"
    assert (stopped.finished, stopped.released) == (1, waiting)


@pytest.mark.once
def test_the_shutdown_counts_only_what_ends_after_its_begin(log: Any) -> None:
    context = make_context(models("update_status").job)
    grace = GracePeriod(context)
    assert grace.left() == float("inf")
    context.runs_ended, context.runs_released = 7, 3
    grace.begin()
    context.runs_ended, context.runs_released = 9, 4
    grace.begin()
    grace.log_stopped()
    [_], [stopped] = logged(log, "shutdown_started"), logged(log, "consumer_stopped")
    assert (stopped.finished, stopped.released) == (2, 1)


def test_an_idle_consumer_says_only_that_it_has_stopped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sqlaqueue")
    with bench.consumer().running() as server:
        wait_until(lambda: logged(caplog, "consumer_started"))
        server.stop()
    assert not logged(caplog, "shutdown_started")
    assert logged(caplog, "consumer_stopped")[0].getMessage() == "queue job: stopped"


def test_jobs_that_outlive_the_grace_period_are_counted_as_released(mixed: Bench, log: Any) -> None:
    mixed.enqueue(2)
    gate = Gate()
    # No pool: the connection of the abandoned handler is returned after the engine was disposed of.
    options: Any = {"engine": {"poolclass": sa.NullPool}, "batch_size": 2, "grace": 0.05}
    # A thread cannot be ended, so run() raises.
    raised = pytest.raises(HandlerNotStopped) if mixed.api == "sync" else contextlib.nullcontext()
    with raised, mixed.consumer(gate, **options).running() as server:
        gate.await_call()
        server.stop()
        # Not its last message: after that it looks at its handlers once more.
        assert server.finished.wait(DEADLINE)
        gate.open()
    [over], [stopped] = logged(log, "grace_period_over"), logged(log, "consumer_stopped")
    assert over.getMessage() == "queue job: the grace period of 0.05 s has passed, releasing 1 running job"
    [began] = logged(log, "shutdown_started")
    assert (stopped.finished, stopped.released) == (0, 1 + began.waiting)


def test_a_drain_logs_no_shutdown(mixed: Bench, log: Any) -> None:
    mixed.enqueue(1)
    mixed.consumer().drain()
    assert logged(log, "consumer_started")[0].mode == "draining"
    assert not logged(log, "shutdown_started")
    assert not logged(log, "consumer_stopped")


@pytest.mark.once
class _Broken:
    """A filter, formatter or handler that raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise ValueError("in a filter")

    def format(self, record: logging.LogRecord) -> str:
        raise ValueError("in a formatter")


class _Emitting(logging.Handler):
    """A handler that does not catch the errors of its formatter, as many have it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)
        raise OSError(errno.ENOSPC, "no space left on the device")


@pytest.mark.parametrize("broken", ["handler", "formatter", "filter of the handler", "filter of the logger"])
def test_logging_that_raises_changes_nothing(
    mixed: Bench, broken: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker logs between a claim and the settlement."""
    mixed.enqueue(3, max_attempts=1)
    monkeypatch.setattr(library_log, "reporter", logging.Handler())
    handler = _Emitting()
    if broken == "formatter":
        handler.setFormatter(_Broken())  # type: ignore[arg-type]  # it is a formatter as far as handlers know
    owner: Any = library_log.logger if broken == "filter of the logger" else handler
    if "filter" in broken:
        owner.addFilter(_Broken())
    library_log.logger.addHandler(handler)
    work = for_some({2: ValueError()})
    try:
        with mixed.consumer(work, concurrency=2).running():
            wait_until(lambda: mixed.states() == {"completed": 2, "failed": 1})
    finally:
        library_log.logger.removeHandler(handler)
        owner.filters.clear()
    assert "--- Logging error ---" in capfd.readouterr().err
    mixed.assert_tidy()


def test_fields_differ_from_the_attributes_of_a_record() -> None:
    record = logging.makeLogRecord({})
    assert not set(FIELDS) & set(vars(record))
    assert set(FIELDS) <= fields("claimed").keys()


def test_repeated_failures_of_claims_are_said_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are at level debug; it is said when claims work again."""
    caplog.set_level(logging.DEBUG, "sqlaqueue")
    failures, claim = ["no route"] * 3 + ["refused"], Claimer.claim

    def fail_first(*arguments: Any) -> Any:
        if failures:
            raise ConnectionError(failures.pop(0))
        return claim(*arguments)

    bench.enqueue(1)
    monkeypatch.setattr(Claimer, "claim", fail_first)
    bench.consumer(bench.work).drain()
    records = [(record.levelname, record.getMessage()) for record in logged(caplog, "consumer_error")]
    warnings = [text for level, text in records if level == "WARNING"]
    assert len(records) == 4
    assert [text.partition(";")[0] for text in warnings] == [
        "queue job: ConnectionError: no route",
        "queue job: ConnectionError: refused",
    ]
    (recovered,) = logged(caplog, "consumer_recovered")
    assert (recovered.levelname, recovered.count) == ("INFO", 4)
    assert recovered.getMessage().startswith("queue job: claims work again, after 4 failures in ")


@pytest.mark.once
def test_failures_that_go_on_are_counted_once_a_minute() -> None:
    clock = iter(range(0, 10_000, 10))
    failures = FailuresInARow(lambda: next(clock))
    assert failures.succeeded() is None
    said = [failures.failed("no route") for _ in range(14)]
    assert [text for text in said if text] == [
        "no route",
        "no route (7 failures in 1 min)",
        "no route (13 failures in 2 min)",
    ]
    assert failures.succeeded() == (14, 140)
    # A text that differs each time is not said each time.
    assert sum(failures.failed(f"port {number}") is not None for number in range(6)) == 5


def test_records_of_a_handler_have_its_job(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The filter gives them the attributes, also in a thread that has the handler's context, and nowhere else."""
    caplog.handler.addFilter(JobLogFilter())
    own = logging.getLogger("shop")

    async def work(io: Any, job: Any) -> None:
        own.warning("at work")
        thread = threading.Thread(target=copy_context().run, args=(own.warning, "in a thread"))
        thread.start()
        thread.join()

    keys = bench.enqueue(2)
    bench.consumer(work, worker_name="baker").drain()
    own.warning("outside")
    *inside, outside = [record.__dict__ for record in caplog.records if record.name == "shop"]
    found = sorted((each["job_key"], each["message"], each["queue"], each["attempt"]) for each in inside)
    assert found == [(key, text, "job", 1) for key in keys for text in ("at work", "in a thread")]
    assert all(each["max_attempts"] == 3 and each["worker"].endswith("baker") for each in inside)
    assert (outside["job_key"], outside["queue"], outside["event"]) == (None, None, None)


def test_records_of_a_handler_of_batches_have_its_jobs(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(JobLogFilter())
    keys = bench.enqueue(3)

    async def work(io: Any, jobs: Any) -> None:
        logging.getLogger("shop").warning("at work")

    bench.consumer(work, batch=True, batch_size=3).drain()
    [record] = [record.__dict__ for record in caplog.records if record.name == "shop"]
    assert (sorted(record["job_key"]), record["count"], record["attempt"]) == (keys, 3, None)


@pytest.mark.once
def test_a_record_is_one_json_object() -> None:
    def written(message: str, **values: Any) -> dict[str, Any]:
        record = logging.makeLogRecord({"name": "shop", "levelname": "INFO", "msg": message, **values})
        line = JSONFormatter().format(record)
        assert "\n" not in line
        found = json.loads(line, parse_constant=pytest.fail)
        assert isinstance(found, dict)
        return found

    found = written("two\nlines", job_key=(1, UUID(int=0)), queue=None, event="claimed", time="mine")
    assert (found["message"], found["level"], found["logger"]) == ("two\nlines", "INFO", "shop")
    assert (found["job_key"], found["event"]) == ([1, str(UUID(int=0))], "claimed")
    assert "queue" not in found
    assert datetime.fromisoformat(found["time"]).utcoffset() == timedelta(0)
    assert written("of a delay", delay=math.inf)["delay"] == "inf"
    assert written("of a mapping", given={(1, 2): 3})["given"] == "{(1, 2): 3}"
    error = ValueError("no")
    assert "ValueError: no" in written("failed", exc_info=(type(error), error, None))["exception"]


@pytest.mark.once
def test_every_record_of_the_library_has_the_fields() -> None:
    """Each call of the logger in the source has ``extra``, without names that a record has itself."""
    own = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    calls = 0
    for path in Path(sqlaqueue.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            names = {keyword.arg for keyword in node.keywords}
            where = f"{path.name}:{node.lineno}"
            if called in {"fields", "context.log_fields"}:
                assert not names & own, f"{where}: {names & own}"
            if called.rpartition(".")[0] == "logger" and called != "logger.isEnabledFor":
                assert "extra" in names, f"{where}: give extra=fields(...)"
                calls += 1
    assert calls > 20


@pytest.mark.once
def test_no_event_is_made_for_a_record_that_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.logger, "level", logging.INFO)
    events.logger.manager._clear_cache()  # type: ignore[attr-defined] # as setLevel() does
    emitter = events.EventEmitter()
    assert not emitter.wants("completed")
    assert not emitter.wants("claimed")
    assert emitter.wants("retried")


@pytest.mark.once
@pytest.mark.parametrize("kind", ["no stock", "", "a:b", "7", "a..b", 5])
def test_an_invalid_kind_of_failure_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Fail\(kind="):
        Fail("no", kind=kind)
