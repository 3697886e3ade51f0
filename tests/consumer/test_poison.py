"""Jobs that kill their worker: retired after their attempts, and nobody else comes to harm."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming import batch_size, claim_jobs
from tests.consumer.bench import Bench, wait_until

pytestmark = [pytest.mark.usefixtures("frequent_sweeps"), pytest.mark.once]


def serve_to_the_end(bench: Bench, handler: str, jobs: int, **options: Any) -> int:
    """Have the queue served, by a new worker whenever one dies, and return how many died."""
    with bench.worker(handler, lease=1, restart=True, **options) as worker:

        def is_done() -> bool:
            assert len(worker.said("died")) <= 3 * jobs, "the poison is not retired"
            assert not worker.has_ended, "\n".join(["a worker ended in another way:", *worker.lines[-40:]])
            states = bench.states()
            return not states["pending"] + states["processing"]

        wait_until(is_done)
        worker.signal(15)
        assert worker.await_end() == 0
        return len(worker.said("died"))


def test_a_poison_job_among_nine_others(bench: Bench) -> None:
    check_poison_among_nine_others(bench)


def test_a_poison_job_among_nine_others_three_at_a_time(mixed: Bench) -> None:
    check_poison_among_nine_others(mixed, concurrency=3, batch_size=2)


def check_poison_among_nine_others(bench: Bench, **options: Any) -> None:
    good = bench.enqueue(5)
    [poison] = bench.enqueue(1, payload="poison", max_attempts=2)
    good += bench.enqueue(4)
    deaths = serve_to_the_end(bench, "deadly", 10, **options)
    assert bench.states() == {"completed": 9, "failed": 1}
    assert bench.row(poison).status == "failed"
    assert bench.attempts() == dict.fromkeys(good, 1) | {poison: 2}
    # What it did in the database went with its worker each time.
    assert bench.effects() == dict.fromkeys(good, 1)
    # Once among others, when nobody could be blamed, and twice by itself.
    assert 2 <= deaths <= 3
    bench.assert_tidy()


def test_a_job_that_takes_all_memory(mixed: Bench) -> None:
    bench = mixed
    good = bench.enqueue(2)
    [greedy] = bench.enqueue(1, payload="greedy", max_attempts=2)
    good += bench.enqueue(2)
    serve_to_the_end(bench, "greedy", 5, retry=None)
    assert bench.states() == {"completed": 4, "failed": 1}
    assert bench.effects() == dict.fromkeys(good, 1)
    assert bench.row(greedy).last_error.startswith("MemoryError")
    bench.assert_tidy()


def test_a_poison_job_in_a_batch(mixed: Bench) -> None:
    bench = mixed
    good = bench.enqueue(3)
    [poison] = bench.enqueue(1, payload="poison", max_attempts=2)
    good += bench.enqueue(3)
    serve_to_the_end(bench, "deadly_batch", 7, batch=True)
    assert bench.states() == {"completed": 6, "failed": 1}
    assert bench.attempts() == dict.fromkeys(good, 1) | {poison: 2}
    assert bench.effects() == dict.fromkeys(good, 1)
    bench.assert_tidy()


def test_two_poison_jobs_are_not_blamed_for_each_other(mixed: Bench) -> None:
    bench = mixed
    poison = bench.enqueue(2, payload="poison", max_attempts=2)
    good = bench.enqueue(2)
    # Two suspects run at once, and both poison jobs may be among them.
    serve_to_the_end(bench, "deadly", 4, concurrency=4)
    assert bench.attempts() == dict.fromkeys(poison, 2) | dict.fromkeys(good, 1)
    assert bench.states() == {"completed": 2, "failed": 2}
    bench.assert_tidy()


def test_a_suspect_that_is_innocent_is_cleared(bench: Bench) -> None:
    """It runs to its end, and nothing is remembered against it."""
    keys = bench.enqueue(3)
    with bench.worker("wait", lease=1) as worker:
        worker.await_word("started")
        worker.signal(9)
        worker.await_end()
    if bench.held:
        assert bench.execute("SELECT count(*) FROM sqlaqueue_crash_journal") == 1
    with bench.consumer(concurrency=2).running():
        wait_until(lambda: bench.states() == {"completed": 3})
    # Under a lease the one that ran had been claimed alone, as the first job ever is.
    assert sum(bench.attempts().values()) <= len(keys) + 1
    bench.assert_tidy()


def test_a_job_that_succeeds_after_its_worker_died_counts_both(bench: Bench) -> None:
    """The first start was its own doing, as far as anybody can know; the second one leaves no trace in its session."""
    [key] = bench.enqueue(1)
    with bench.worker("wait", lease=1, batch_size=1) as worker:
        worker.await_word("started")
        worker.signal(9)
        worker.await_end()
    with bench.consumer(batch_size=1).running():
        wait_until(lambda: bench.states() == {"completed": 1})
    assert bench.attempts() == {key: 2}
    bench.assert_tidy()


def test_suspects_do_not_keep_the_others_from_running(bench: Bench) -> None:
    """While one of them takes its time."""
    suspects = bench.enqueue(3, payload="suspect")
    with bench.worker("wait", lease=1, concurrency=3, batch_size=3) as worker:
        worker.await_word("started", times=1)
        if not bench.held:
            worker.await_word("started", times=3)
        worker.signal(9)
        worker.await_end()
    slow, at_work, most = threading.Event(), [0], [0]

    async def work(hands: Any, job: Any) -> None:
        if job.payload == "suspect":
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
            await hands.wait(slow)
            at_work[0] -= 1

    with bench.consumer(work, concurrency=3, batch_size=2).running():
        wait_until(lambda: at_work[0] == 1)
        bench.enqueue(20)
        wait_until(lambda: bench.states()["completed"] == 20)
        slow.set()
        wait_until(lambda: bench.states() == {"completed": 23})
    assert most == [1]
    assert {bench.row(key).attempts for key in suspects} == {1}
    bench.assert_tidy()


def suspects(leased: Bench) -> list[int]:
    """Return the keys of jobs that read as if their worker had died."""
    keys = leased.enqueue(4)
    leased.execute(sa.update(leased.Job).values(lease_token=sa.func.gen_random_uuid()))
    return keys


def test_a_suspect_that_there_was_no_time_to_begin_is_still_the_only_one(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is busy may take long between a claim and its first call; others make it then."""
    monkeypatch.setattr(batch_size, "_ALONE", 0.0)
    monkeypatch.setattr(batch_size, "_AMONG_OTHERS", 0.0)
    keys, at_work, most = suspects(leased), [0], [0]

    async def work(hands: Any, job: Any) -> None:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        await hands.execute(sa.text("SELECT pg_sleep(0.05)"))
        at_work[0] -= 1

    with leased.consumer(work, concurrency=3).running():
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert most == [1]
    leased.assert_tidy()


def test_a_suspect_whose_run_breaks_off_makes_room_for_the_next(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong with it: one that runs for ever would keep all others from running."""
    keys, broken = suspects(leased), []

    def break_once(session: Session) -> bool:
        if not broken:
            broken.append(session)
            # As when somebody else runs it then.
            leased.execute(sa.update(leased.Job).where(leased.Job.id == keys[0]).values(status="completed"))
            raise sa.exc.OperationalError("ROLLBACK", {}, ConnectionError("gone"))
        return undo(session)

    undo = leased._undo
    monkeypatch.setattr(leased, "_undo", break_once)

    async def work(hands: Any, job: Any) -> None:
        if not broken:
            msg = "fails"
            raise ValueError(msg)

    with leased.consumer(work, concurrency=3).running():
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert broken
    leased.assert_tidy()


def test_one_lane_at_a_time_looks_for_suspects(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may claim at once, and two that look might each take a suspect."""
    most: Counter[str] = Counter()

    def watch(name: str) -> None:
        operation, at_once = getattr(claim_jobs, name), [0]

        def watched(session: Session, *arguments: Any) -> Any:
            at_once[0] += 1
            most[name] = max(most[name], at_once[0])
            session.execute(sa.text("SELECT pg_sleep(0.01)"))
            at_once[0] -= 1
            return operation(session, *arguments)

        monkeypatch.setattr(claim_jobs, name, watched)

    watch("claim")
    watch("_claim_suspects")
    leased.enqueue(300)
    with leased.consumer(concurrency=2, batch_size=10).running():
        wait_until(lambda: leased.states() == {"completed": 300})
    assert most == {"claim": 2, "_claim_suspects": 1}


def test_a_worker_that_loses_the_database_is_not_taken_for_dead(bench: Bench) -> None:
    """No attempt is counted: the job runs again by itself, and nothing is remembered against it."""
    bench.enqueue(1)
    go_on, started = threading.Event(), threading.Event()

    async def work(hands: Any, job: Any) -> None:
        await hands.execute(bench.effect(job.id))
        started.set()
        await hands.wait(go_on)

    with bench.consumer(work, retry=lambda *_: 0).running():
        assert started.wait(30)
        bench.database.kill_backends()
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": 1})
    assert set(bench.attempts().values()) == {1}
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()
