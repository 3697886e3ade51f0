"""Jobs whose handlers fail: retry policies, limits of attempts, signals, outcomes, and the stored error."""

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Cancel, Constant, Consumer, Exponential, Fail, Linear, Retry, Snooze, States
from sqlaqueue.consumer.outcomes import (
    LONGEST_DELAY,
    RELEASED,
    CancellationRequested,
    HandlerAbandoned,
    applies_to_batch,
    outcome_of,
)
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.run import Run
from tests.consumer.bench import Bench, Server, for_some
from tests.consumer.models import STRATEGIES
from tests.models import create, insert, make_job, read
from tests.servers import Database


def delay_of(bench: Bench, key: int) -> float:
    delay = "SELECT extract(epoch FROM run_at - clock_timestamp()) FROM job WHERE id = :key"
    return float(bench.execute(delay, key=key))


POLICIES: list[tuple[Any, float]] = [
    (Constant(delay=1000, jitter=0), 1000),
    (Linear(step=timedelta(seconds=1000), jitter=0), 1000),
    (Exponential(base=1000, factor=3, jitter=0), 1000),
    (Exponential(base=10**9, jitter=0, cap=5000), 5000),
    (lambda attempt, error: 1000 * attempt if isinstance(error, ValueError) else None, 1000),
    (lambda attempt, error: timedelta(seconds=1000), 1000),
]


def test_a_policy_returns_the_delay_of_a_retry(bench: Bench) -> None:
    keys = bench.enqueue(len(POLICIES))
    policies = dict(zip(keys, POLICIES, strict=True))

    errors = {key: ValueError("no luck", key) for key in keys}
    server = bench.consumer(
        bench.doing(errors), retry=lambda attempt, error: policies[error.args[1]][0](attempt, error)
    )
    assert server.drain() == len(keys)
    assert bench.states() == {"pending": len(keys)}
    for key, (_, delay) in policies.items():
        assert delay - 60 < delay_of(bench, key) <= delay
        assert bench.row(key).attempts == 1
        assert bench.row(key).last_error.splitlines()[0] == f"ValueError: ('no luck', {key})"
    assert server.told("retried") == keys
    bench.expect(effects={})


def test_jitter_spreads(bench: Bench) -> None:
    keys = bench.enqueue(5)
    bench.consumer(bench.failing(ValueError()), retry=Constant(delay=1000, jitter=1)).drain()
    assert len({round(delay_of(bench, key), 3) for key in keys}) == 5


def test_a_policy_that_gives_up_fails_the_job(bench: Bench) -> None:
    [key] = bench.enqueue(1)
    bench.consumer(bench.failing(ValueError("hopeless")), retry=lambda *_: None).drain()
    row = bench.row(key)
    assert (row.status, row.attempts, row.last_error.splitlines()[0]) == ("failed", 1, "ValueError: hopeless")
    assert row.finished_at is not None
    bench.assert_tidy()


def test_a_policy_that_fails_costs_no_job_its_retry(bench: Bench, log: Any) -> None:
    answers: list[Any] = [-5, "soon", float("nan"), ZeroDivisionError()]
    keys = bench.enqueue(len(answers))

    def policy(attempt: int, error: BaseException) -> Any:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    bench.consumer(bench.doing({key: ValueError() for key in keys}), retry=policy).drain()
    assert bench.states() == {"pending": 4}
    assert all(0 < delay_of(bench, key) <= 5 for key in keys)
    assert log.text.count("using the default backoff") == 4
    assert len([record for record in log.records if record.levelno >= logging.WARNING]) == 4


def test_attempts_are_limited_by_the_config_or_by_the_row(bench: Bench) -> None:
    keys = bench.enqueue(1), bench.enqueue(1, max_attempts=1), bench.enqueue(1, max_attempts=5)
    server = bench.consumer(bench.failing(ValueError()))
    assert server.drain() == 3 + 1 + 5
    assert bench.states() == {"failed": 3}
    assert [bench.row(key).attempts for [key] in keys] == [3, 1, 5]
    assert len(server.told("failed")) == 3
    bench.assert_tidy()


def test_retry_sets_the_delay_and_the_stored_error(bench: Bench) -> None:
    [key] = bench.enqueue(1)
    bench.consumer(bench.failing(Retry(timedelta(hours=1), error="come back"))).drain()
    row = bench.row(key)
    assert (row.status, row.attempts, row.last_error) == ("pending", 1, "Retry: come back")
    assert 3500 < delay_of(bench, key) <= 3600


def test_retry_without_a_delay_uses_the_policy_and_the_limit(bench: Bench) -> None:
    [key] = bench.enqueue(1, last_error="an older one")
    server = bench.consumer(bench.failing(Retry()))
    assert server.drain() == 3
    assert (bench.row(key).status, bench.row(key).attempts) == ("failed", 3)
    assert "retry requested" in bench.row(key).last_error


def test_snooze_counts_no_attempt(bench: Bench) -> None:
    [key] = bench.enqueue(1, max_attempts=1)
    server = bench.consumer(bench.failing(Snooze(3600)))
    assert server.drain() == 0
    assert (bench.row(key).status, bench.row(key).attempts) == ("pending", 0)
    assert 3500 < delay_of(bench, key) <= 3600
    assert server.told("released") == [key]
    bench.expect(effects={})


@pytest.mark.parametrize(
    ("signal", "state", "stored"),
    [
        (Fail("no such address"), "failed", "Fail: no such address"),
        (Fail("order 1: no stock", kind="no_stock"), "failed", "no_stock: order 1: no stock"),
        (Cancel("not needed"), "cancelled", "not needed"),
    ],
)
def test_fail_and_cancel_are_final(bench: Bench, signal: Any, state: str, stored: str) -> None:
    [key] = bench.enqueue(1)
    server = bench.consumer(bench.failing(signal))
    assert server.drain() == 1
    row = bench.row(key)
    assert (row.status, row.attempts, row.last_error) == (state, 1, stored)
    assert server.told(state) == [key]
    bench.expect(effects={})


def test_an_invalid_signal_is_a_failure(bench: Bench) -> None:
    signals: Any = [Snooze(-1), Snooze(float("nan")), Retry("soon"), Fail(ValueError("an error"))]  # type: ignore[arg-type] # what people pass
    keys = bench.enqueue(len(signals), max_attempts=1)
    bench.consumer(bench.doing(dict(zip(keys, signals, strict=True)))).drain()
    bench.expect({"failed": len(keys)}, attempts=1)


def test_a_delay_beyond_the_calendar_is_long(bench: Bench) -> None:
    signals = [Snooze(1e15), Retry(1e300), Snooze(timedelta.max)]
    keys = bench.enqueue(len(signals))
    bench.consumer(bench.doing(dict(zip(keys, signals, strict=True)))).drain()
    assert bench.states() == {"pending": len(keys)}
    assert all(delay_of(bench, key) > 10**9 for key in keys)


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError


TEXTS = [
    (ValueError("nul \0 byte"), "ValueError: nul \\0 byte"),
    (ValueError("lone \ud800 surrogate"), "ValueError: lone \\ud800 surrogate"),
    (ValueError("x" * 1_000_000), "ValueError: " + "x" * 1000),
    (BadText(), "BadText"),
    (KeyError("plain"), "KeyError: 'plain'"),
    (Fail("nul \0 byte"), "Fail: nul \\0 byte"),
    (Retry(error="lone \ud800"), "Retry: lone \\ud800"),
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit(), "GeneratorExit"),
    (asyncio.CancelledError(), "CancelledError"),
    (BaseException("base"), "BaseException: base"),
]


def test_any_exception_of_a_handler_is_stored_and_other_jobs_run(bench: Bench, log: Any) -> None:
    # pytest's own report of what was logged cannot hold every text.
    log.set_level(logging.CRITICAL, "sqlaqueue")
    keys = bench.enqueue(len(TEXTS), max_attempts=1)
    good = bench.enqueue(4)
    bench.consumer(bench.doing(dict(zip(keys, [error for error, _ in TEXTS], strict=True)))).drain()
    assert bench.states() == {"failed": len(keys), "completed": 4}
    for key, (_, stored) in zip(keys, TEXTS, strict=True):
        assert bench.row(key).last_error.startswith(stored)
        assert len(bench.row(key).last_error) < 110_000
    bench.expect(attempts=1, effects=good)


def test_a_failing_job_does_not_fail_its_batch(bench: Bench) -> None:
    bad, *good = bench.enqueue(10)
    work = bench.doing({bad: lambda io, job: io.execute(sa.text("SELECT 1 / 0"))})
    bench.consumer(work, batch_size=10).drain()
    bench.expect(attempts={bad: 3} | dict.fromkeys(good, 1), effects=good)


def test_a_batch_that_fails_is_tried_job_by_job(bench: Bench) -> None:
    bad, *good = bench.enqueue(6)
    calls: list[list[int]] = []

    async def work(io: Any, jobs: Any) -> None:
        calls.append([job.id for job in jobs])
        for job in jobs:
            # Attributes must be there after what went before was undone.
            await io.execute(bench.effect(job.id, note=job.payload))
            job.payload = "changed"
        await io.flush()
        if any(job.id == bad for job in jobs):
            raise ValueError

    server = bench.consumer(work, batch=True)
    assert server.drain() == 8
    assert calls[0] == [bad, *good]
    assert sorted(calls[1:]) == sorted([[key] for key in good] + [[bad]] * 3)
    assert bench.effects() == dict.fromkeys(good, 1)
    assert {row.payload for key, row in bench.rows().items() if key != bad} == {"changed"}
    bench.expect(attempts={bad: 3} | dict.fromkeys(good, 1))


def test_a_signal_from_a_batch_handler_applies_to_all_of_its_jobs(bench: Bench) -> None:
    keys = bench.enqueue(4)
    calls: list[int] = []

    async def work(io: Any, jobs: Any) -> None:
        calls.append(len(jobs))
        raise Snooze(3600)

    server = bench.consumer(work, batch=True)
    server.drain()
    assert calls == [4]
    assert sorted(server.told("released")) == keys
    assert set(bench.attempts().values()) == {0}


@pytest.fixture
def one_effect(bench: Bench) -> Iterator[None]:
    """Let a constraint, which only the commit checks, forbid a second effect of a job."""
    bench.execute("ALTER TABLE effect ADD CONSTRAINT once UNIQUE (job) DEFERRABLE INITIALLY DEFERRED")
    yield
    bench.execute("ALTER TABLE effect DROP CONSTRAINT once")


@pytest.mark.usefixtures("one_effect")
def test_an_error_of_the_flush_or_the_commit_is_the_error_of_the_job(bench: Bench) -> None:
    keys = bench.enqueue(6)
    late, flushed = keys[1], keys[3]

    async def add_none(io: Any, job: Any) -> None:
        io.add(bench.Effect(job=None))

    bench.consumer(bench.doing({late: bench.work, flushed: add_none})).drain()
    bench.expect({"completed": 4, "failed": 2}, attempts=dict.fromkeys(keys, 1) | {late: 3, flushed: 3})
    assert "IntegrityError" in bench.row(late).last_error
    assert "IntegrityError" in bench.row(flushed).last_error
    bench.expect(effects={*keys} - {late, flushed})


@pytest.mark.usefixtures("one_effect")
def test_a_batch_whose_commit_is_refused_is_tried_job_by_job(bench: Bench) -> None:
    bad, *good = bench.enqueue(4)

    async def work(io: Any, jobs: Any) -> None:
        for job in jobs:
            for _ in range(2 if job.id == bad else 1):
                await io.execute(bench.effect(job.id))

    bench.consumer(work, batch=True).drain()
    bench.expect(attempts={bad: 3} | dict.fromkeys(good, 1), effects=good)


def test_a_job_whose_completion_the_database_refuses_fails(leased: Bench) -> None:
    """Here a trigger of the user's own; the others' results must not wait for it."""
    leased.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    )
    leased.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON job FOR EACH ROW "
        "WHEN (NEW.payload = 'bad' AND NEW.status = 'completed') EXECUTE FUNCTION refuse()"
    )
    try:
        leased.enqueue(3)
        [bad] = leased.enqueue(1, payload="bad")
        leased.enqueue(3)
        leased.consumer(batch_size=7).drain()
        assert leased.states() == {"completed": 6, "failed": 1}
        assert "not this one" in leased.row(bad).last_error
    finally:
        leased.execute("DROP FUNCTION refuse CASCADE")


# -- retry policies and durations, without a database --------------------------------------------------------------
jitters = st.floats(0, 1)
delays = st.one_of(st.just(0.0), st.floats(1e-6, 1e9))
attempts = st.integers(1, 10_000)
durations = st.one_of(delays, st.timedeltas(timedelta(0), timedelta(days=10_000)))


@pytest.mark.once
@given(delays, delays, jitters, attempts)
def test_every_policy_keeps_within_its_jitter_and_its_cap(
    delay: float, cap: float, jitter: float, attempt: int
) -> None:
    for policy, full in (
        (Constant(delay=delay, jitter=jitter, cap=cap), delay),
        (Linear(step=delay, jitter=jitter, cap=cap), delay * attempt),
        (Exponential(base=delay, factor=2, jitter=jitter, cap=cap), delay * 2.0 ** min(attempt - 1, 900)),
    ):
        longest = min(full, cap)
        assert longest * (1 - jitter) * 0.999 <= policy(attempt, ValueError()) <= longest


@pytest.mark.once
@given(durations)
def test_durations_are_seconds_or_timedeltas(duration: Any) -> None:
    assert seconds(duration) == (duration.total_seconds() if isinstance(duration, timedelta) else duration)


@pytest.mark.once
@pytest.mark.parametrize("duration", [-1, float("nan"), float("inf"), True, "1", None, timedelta(seconds=-1)])
def test_other_durations_are_refused(duration: Any) -> None:
    with pytest.raises(ConfigurationError, match="the delay must be seconds"):
        seconds(duration, "the delay")


@pytest.mark.once
@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(jitter=-0.1),
        lambda: Constant(jitter=1.1),
        lambda: Linear(step=-1),
        lambda: Exponential(base=float("nan")),
        lambda: Exponential(factor=0.5),
        lambda: Exponential(factor=float("nan")),
        lambda: Constant(cap=-1),
    ],
)
def test_invalid_policies_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.once
def test_the_first_argument_of_a_policy_is_its_delay() -> None:
    assert Constant(0.3) == Constant(delay=0.3)
    assert Linear(0.3) == Linear(step=0.3)
    assert Exponential(0.3) == Exponential(base=0.3)
    for policy in (Constant, Linear, Exponential):
        with pytest.raises(TypeError, match="positional argument"):
            policy(0.3, 2)  # type: ignore[operator] # one of three classes


# -- how the result of a handler becomes the outcome of its run, without a database --------------------------------
errors = st.one_of(
    st.builds(Retry, st.one_of(st.none(), durations, st.just(-1), st.just("soon")), st.one_of(st.none(), st.text())),
    st.builds(Snooze, st.one_of(durations, st.just(float("nan")))),
    st.builds(Fail, st.text()),
    st.builds(Cancel, st.text()),
    st.builds(ValueError, st.text(st.characters(exclude_categories=()))),
    st.sampled_from([SystemExit(1), KeyboardInterrupt(), HandlerAbandoned(), CancellationRequested({(1,)})]),
)
policies = st.sampled_from([Constant(), lambda *_: None, lambda *_: -1, lambda *_: 1 / 0, lambda *_: 1e300])


@pytest.mark.once
@given(errors, attempts, attempts, policies, st.booleans())
def test_a_run_has_an_outcome_whatever_was_raised(
    error: BaseException,
    attempt: int,
    max_attempts: int,
    policy: Any,
    has_run_at: bool,  # noqa: FBT001 - drawn
) -> None:
    outcome = outcome_of(error, Run((1,), None, attempt, max_attempts, None), policy, has_run_at=has_run_at)
    assert outcome.event != "completed"
    assert outcome.delay is None or (has_run_at and 0 <= outcome.delay <= LONGEST_DELAY)
    if outcome.event == "retried":
        assert attempt < max_attempts
    if outcome.error is not None:
        outcome.error.encode()
        assert "\0" not in outcome.error
    # The settlement can be built: nothing raises later, when other runs are settled with it.
    outcome.settlement()


@pytest.mark.once
@given(attempts, attempts)
def test_attempts_are_limited(attempt: int, max_attempts: int) -> None:
    outcome = outcome_of(ValueError(), Run((1,), None, attempt, max_attempts, None), Constant(delay=1))
    assert outcome.event == ("failed" if attempt >= max_attempts else "retried")


@pytest.mark.once
def test_an_abandoned_run_is_released_even_at_its_last_attempt() -> None:
    assert outcome_of(HandlerAbandoned(), Run((1,), None, 3, 3, None), Constant()) is RELEASED


@pytest.mark.once
def test_an_error_of_a_batch_handler_applies_to_the_batch_or_to_some_of_its_jobs() -> None:
    assert all(map(applies_to_batch, [Retry(), Snooze(1), Fail(), Cancel(), HandlerAbandoned()]))
    assert not any(map(applies_to_batch, [ValueError(), SystemExit(), CancellationRequested({(1,)})]))


# -- tables that have no status value for one of the states in which a run may end ---------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_status_value_for_it_a_cancelled_job_is_failed(
    shared: Database, engine: sa.Engine, strategy: str
) -> None:
    job = create(engine, make_job(strategy, states=States(cancelled=None)))
    insert(engine, job, 2)
    Server(shared, "sync", job, for_some({1: Cancel("not needed")})).drain()
    assert read(engine, job) == {1: "failed", 2: "completed"}
    assert read(engine, job, "last_error") == {1: "not needed", 2: None}


@pytest.mark.once
@pytest.mark.parametrize("state", ["failed", "completed"])
def test_a_consumer_needs_status_values_for_the_outcomes_of_runs(state: str) -> None:
    job = make_job(states=States(**{state: None}))
    with pytest.raises(
        ConfigurationError, match=rf"Job has no value for the state .*{state}.*States\({state}=\.\.\.\)"
    ):
        Consumer(job, print, sessionmaker())


@pytest.mark.once
def test_where_completed_jobs_are_deleted_it_needs_no_value_for_them() -> None:
    Consumer(make_job(states=States(completed=None), on_complete="delete"), print, sessionmaker())
