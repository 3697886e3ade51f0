"""Jobs whose handlers fail: retry policies, limits of attempts, signals, and the stored error."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import Cancel, Constant, Exponential, Fail, Linear, Retry, Snooze
from tests.consumer.bench import Bench


def raising(error: BaseException) -> Any:
    """Return a handler that has an effect and then raises."""

    async def handle(io: Any, job: Any) -> None:
        await io.execute(sa.text("INSERT INTO effect (job) VALUES (:job)"), {"job": job.id})
        raise error

    return handle


def raising_by_key(errors: dict[int, BaseException]) -> Any:
    """The same, with an error for each of some jobs."""

    async def handle(io: Any, job: Any) -> None:
        await io.execute(sa.text("INSERT INTO effect (job) VALUES (:job)"), {"job": job.id})
        if job.id in errors:
            raise errors[job.id]

    return handle


def delay_of(bench: Bench, key: int) -> float:
    """Return in how many seconds a job is due."""
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

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        error = ValueError("no luck")
        error.args = ("no luck", job.id)
        raise error

    server = bench.consumer(work, retry=lambda attempt, error: policies[error.args[1]][0](attempt, error))
    assert server.drain() == len(keys)
    assert bench.states() == {"pending": len(keys)}
    for key, (_, delay) in policies.items():
        assert delay - 60 < delay_of(bench, key) <= delay
        assert bench.row(key).attempts == 1
        assert bench.row(key).last_error == f"ValueError: ('no luck', {key})"
    assert server.told("retried") == keys
    assert not bench.effects()
    bench.assert_tidy()


def test_jitter_spreads(bench: Bench) -> None:
    keys = bench.enqueue(5)
    bench.consumer(raising(ValueError()), retry=Constant(delay=1000, jitter=1)).drain()
    assert len({round(delay_of(bench, key), 3) for key in keys}) == 5


def test_a_policy_that_gives_up_fails_the_job(bench: Bench) -> None:
    [key] = bench.enqueue(1)
    bench.consumer(raising(ValueError("hopeless")), retry=lambda *_: None).drain()
    row = bench.row(key)
    assert (row.status, row.attempts, row.last_error) == ("failed", 1, "ValueError: hopeless")
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

    bench.consumer(raising_by_key({key: ValueError() for key in keys}), retry=policy).drain()
    assert bench.states() == {"pending": 4}
    assert all(0 < delay_of(bench, key) <= 5 for key in keys)
    assert log.text.count("using the default backoff") == 4
    assert len([record for record in log.records if record.levelno >= logging.WARNING]) == 4


def test_attempts_are_limited_by_the_config_or_by_the_row(bench: Bench) -> None:
    keys = bench.enqueue(1), bench.enqueue(1, max_attempts=1), bench.enqueue(1, max_attempts=5)
    server = bench.consumer(raising(ValueError()))
    assert server.drain() == 3 + 1 + 5
    assert bench.states() == {"failed": 3}
    assert [bench.row(key).attempts for [key] in keys] == [3, 1, 5]
    assert len(server.told("failed")) == 3
    bench.assert_tidy()


def test_retry_sets_the_delay_and_the_stored_error(bench: Bench) -> None:
    [key] = bench.enqueue(1)
    bench.consumer(raising(Retry(timedelta(hours=1), error="come back"))).drain()
    row = bench.row(key)
    assert (row.status, row.attempts, row.last_error) == ("pending", 1, "Retry: come back")
    assert 3500 < delay_of(bench, key) <= 3600


def test_retry_without_a_delay_uses_the_policy_and_the_limit(bench: Bench) -> None:
    [key] = bench.enqueue(1, last_error="an older one")
    server = bench.consumer(raising(Retry()))
    assert server.drain() == 3
    assert (bench.row(key).status, bench.row(key).attempts) == ("failed", 3)
    assert "retry requested" in bench.row(key).last_error


def test_snooze_counts_no_attempt(bench: Bench) -> None:
    [key] = bench.enqueue(1, max_attempts=1)
    server = bench.consumer(raising(Snooze(3600)))
    assert server.drain() == 0
    assert (bench.row(key).status, bench.row(key).attempts) == ("pending", 0)
    assert 3500 < delay_of(bench, key) <= 3600
    assert server.told("released") == [key]
    assert not bench.effects()
    bench.assert_tidy()


@pytest.mark.each_value
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
    server = bench.consumer(raising(signal))
    assert server.drain() == 1
    row = bench.row(key)
    assert (row.status, row.attempts, row.last_error) == (state, 1, stored)
    assert server.told(state) == [key]
    assert not bench.effects()
    bench.assert_tidy()


def test_an_invalid_signal_is_a_failure(bench: Bench) -> None:
    signals: Any = [Snooze(-1), Snooze(float("nan")), Retry("soon"), Fail(ValueError("an error"))]  # type: ignore[arg-type] # what people pass
    keys = bench.enqueue(len(signals), max_attempts=1)
    bench.consumer(raising_by_key(dict(zip(keys, signals, strict=True)))).drain()
    assert bench.states() == {"failed": len(keys)}
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def test_a_delay_beyond_the_calendar_is_long(bench: Bench) -> None:
    signals = [Snooze(1e15), Retry(1e300), Snooze(timedelta.max)]
    keys = bench.enqueue(len(signals))
    bench.consumer(raising_by_key(dict(zip(keys, signals, strict=True)))).drain()
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
    bench.consumer(raising_by_key(dict(zip(keys, [error for error, _ in TEXTS], strict=True)))).drain()
    assert bench.states() == {"failed": len(keys), "completed": 4}
    for key, (_, stored) in zip(keys, TEXTS, strict=True):
        assert bench.row(key).last_error.startswith(stored)
        assert len(bench.row(key).last_error) < 110_000
    assert set(bench.attempts().values()) == {1}
    assert bench.effects() == dict.fromkeys(good, 1)
    bench.assert_tidy()


def test_a_failing_job_does_not_fail_its_batch(bench: Bench) -> None:
    bad, *good = bench.enqueue(10)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            await io.execute(sa.text("SELECT 1 / 0"))

    bench.consumer(work, batch_size=10).drain()
    assert bench.effects() == dict.fromkeys(good, 1)
    assert bench.attempts() == {bad: 3} | dict.fromkeys(good, 1)
    bench.assert_tidy()


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
    assert bench.attempts() == {bad: 3} | dict.fromkeys(good, 1)
    bench.assert_tidy()


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


def test_an_error_of_the_flush_or_the_commit_is_the_error_of_the_job(bench: Bench) -> None:
    """A flush, and a constraint that is only checked by the commit."""
    bench.execute("ALTER TABLE effect ADD CONSTRAINT once UNIQUE (job) DEFERRABLE INITIALLY DEFERRED")
    try:
        keys = bench.enqueue(6)
        late, flushed = keys[1], keys[3]

        async def work(io: Any, job: Any) -> None:
            await io.execute(bench.effect(job.id))
            if job.id == late:
                await io.execute(bench.effect(job.id))
            if job.id == flushed:
                io.add(bench.Effect(job=None))

        bench.consumer(work).drain()
        assert bench.states() == {"completed": 4, "failed": 2}
        assert bench.attempts() == dict.fromkeys(keys, 1) | {late: 3, flushed: 3}
        assert "IntegrityError" in bench.row(late).last_error
        assert "IntegrityError" in bench.row(flushed).last_error
        assert bench.effects() == dict.fromkeys({*keys} - {late, flushed}, 1)
        bench.assert_tidy()
    finally:
        bench.execute("ALTER TABLE effect DROP CONSTRAINT once")


def test_a_batch_whose_commit_is_refused_is_tried_job_by_job(bench: Bench) -> None:
    bench.execute("ALTER TABLE effect ADD CONSTRAINT once UNIQUE (job) DEFERRABLE INITIALLY DEFERRED")
    try:
        bad, *good = bench.enqueue(4)

        async def work(io: Any, jobs: Any) -> None:
            for job in jobs:
                for _ in range(2 if job.id == bad else 1):
                    await io.execute(bench.effect(job.id))

        bench.consumer(work, batch=True).drain()
        assert bench.effects() == dict.fromkeys(good, 1)
        assert bench.attempts() == {bad: 3} | dict.fromkeys(good, 1)
        bench.assert_tidy()
    finally:
        bench.execute("ALTER TABLE effect DROP CONSTRAINT once")


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
