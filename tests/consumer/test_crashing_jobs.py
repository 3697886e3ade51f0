"""Jobs that crash their worker: they fail after their attempts, and no attempt of another job is counted."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer import leased as leased_routines
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.claim import Claimer
from tests.consumer.bench import Bench
from tests.programs import wait_until

pytestmark = [pytest.mark.usefixtures("frequent_rescues"), pytest.mark.once]


def serve_to_the_end(bench: Bench, handler: str, jobs: int, **options: Any) -> int:
    """Run workers until all jobs have ended, a new one whenever one dies, and return how many died."""
    with bench.worker(handler, lease=1, restart=True, **options) as worker:

        def is_done() -> bool:
            assert len(worker.said("died")) <= 3 * jobs, "the poison job does not fail"
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
    # Once among others, when the responsible job was unknown, and twice by itself.
    assert 2 <= deaths <= 3
    bench.assert_tidy()


def test_a_handler_that_closes_descriptors_ends_its_worker(mixed: Bench) -> None:
    """Nothing could wake its main thread, and a signal would not end it."""
    bench = mixed
    [good, bad] = [*bench.enqueue(1), *bench.enqueue(1, payload="closing")]
    with bench.worker("closing") as worker:
        assert worker.await_end() != 0
    assert bench.row(bad).status != "completed"
    assert bench.effects() <= Counter([good])


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


def test_two_poison_jobs_spend_their_own_attempts_only(mixed: Bench) -> None:
    bench = mixed
    poison = bench.enqueue(2, payload="poison", max_attempts=2)
    good = bench.enqueue(2)
    # Two quarantined jobs run at once, and both poison jobs may be among them.
    serve_to_the_end(bench, "deadly", 4, concurrency=4)
    assert bench.attempts() == dict.fromkeys(poison, 2) | dict.fromkeys(good, 1)
    assert bench.states() == {"completed": 2, "failed": 2}
    bench.assert_tidy()


def test_a_quarantined_job_that_completes_leaves_the_quarantine(bench: Bench) -> None:
    """No attempt is counted for the crash."""
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
    """It ran alone, so it counts as responsible for the crash; its second run does not use its session."""
    [key] = bench.enqueue(1)
    with bench.worker("wait", lease=1, batch_size=1) as worker:
        worker.await_word("started")
        worker.signal(9)
        worker.await_end()
    with bench.consumer(batch_size=1).running():
        wait_until(lambda: bench.states() == {"completed": 1})
    assert bench.attempts() == {key: 2}
    bench.assert_tidy()


def test_quarantined_jobs_do_not_block_other_jobs(bench: Bench) -> None:
    """While one of them is slow."""
    quarantined = bench.enqueue(3, payload="quarantined")
    with bench.worker("wait", lease=1, concurrency=3, batch_size=3) as worker:
        worker.await_word("started", times=1)
        if not bench.held:
            worker.await_word("started", times=3)
        worker.signal(9)
        worker.await_end()
    slow, running, most = threading.Event(), [0], [0]

    async def work(io: Any, job: Any) -> None:
        if job.payload == "quarantined":
            running[0] += 1
            most[0] = max(most[0], running[0])
            await io.wait(slow)
            running[0] -= 1

    with bench.consumer(work, concurrency=3, batch_size=2).running():
        wait_until(lambda: running[0] == 1)
        bench.enqueue(20)
        wait_until(lambda: bench.states()["completed"] == 20)
        slow.set()
        wait_until(lambda: bench.states() == {"completed": 23})
    assert most == [1]
    assert {bench.row(key).attempts for key in quarantined} == {1}
    bench.assert_tidy()


def enqueue_quarantined(leased: Bench) -> list[int]:
    """Return the keys of jobs whose rows are as a dead worker leaves them."""
    keys = leased.enqueue(4)
    leased.execute(sa.update(leased.Job).values(lease_token=sa.func.gen_random_uuid()))
    return keys


def test_a_quarantined_job_that_begins_late_still_runs_alone(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the time between a claim and its first call may be long; then another worker runs the job."""
    monkeypatch.setattr(pace, "_IN_ROW_ALONE", 0.0)
    monkeypatch.setattr(pace, "_IN_ROW_AMONG_OTHERS", 0.0)
    keys, running, most = enqueue_quarantined(leased), [0], [0]

    async def work(io: Any, job: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await io.execute(sa.text("SELECT pg_sleep(0.05)"))
        running[0] -= 1

    with leased.consumer(work, concurrency=3).running():
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert most == [1]
    leased.assert_tidy()


def test_a_quarantined_job_whose_run_fails_lets_the_next_one_run(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error: a job that seems to run for ever would block all other quarantined jobs."""
    keys, broken = enqueue_quarantined(leased), []

    def break_once(session: Session) -> bool:
        if not broken:
            broken.append(session)
            # As when another worker runs it then.
            leased.execute(sa.update(leased.Job).where(leased.Job.id == keys[0]).values(status="completed"))
            raise sa.exc.OperationalError("ROLLBACK", {}, ConnectionError("gone"))
        return undo(session)

    undo = leased_routines._undo
    monkeypatch.setattr(leased_routines, "_undo", break_once)

    async def work(io: Any, job: Any) -> None:
        if not broken:
            msg = "fails"
            raise ValueError(msg)

    with leased.consumer(work, concurrency=3).running():
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert broken
    leased.assert_tidy()


def test_one_worker_at_a_time_claims_quarantined_jobs(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers may claim at once, and each of them might claim a quarantined job."""
    most: Counter[str] = Counter()

    def watch(name: str) -> None:
        operation, at_once = getattr(Claimer, name), [0]

        def watched(self: Claimer, session: Session, *arguments: Any) -> Any:
            at_once[0] += 1
            most[name] = max(most[name], at_once[0])
            session.execute(sa.text("SELECT pg_sleep(0.01)"))
            at_once[0] -= 1
            return operation(self, session, *arguments)

        monkeypatch.setattr(Claimer, name, watched)

    watch("claim")
    watch("claim_quarantined")
    leased.enqueue(300)
    with leased.consumer(concurrency=2, batch_size=10).running():
        wait_until(lambda: leased.states() == {"completed": 300})
    assert most == {"claim": 2, "claim_quarantined": 1}


def test_a_lost_connection_does_not_count_as_a_crash(bench: Bench) -> None:
    """No attempt is counted: the job runs again by itself."""
    bench.enqueue(1)
    go_on, started = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        started.set()
        await io.wait(go_on)

    with bench.consumer(work, retry=lambda *_: 0).running():
        assert started.wait(30)
        bench.database.kill_backends()
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": 1})
    assert set(bench.attempts().values()) == {1}
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()
