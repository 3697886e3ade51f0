"""Quarantined jobs: after a crash several run at once, and no attempt is counted for those that did not cause it."""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer.quarantine import Quarantine, QuarantinedJob
from sqlaqueue.strategies.update_status import several_quarantined_token
from tests.consumer.bench import Bench
from tests.programs import wait_until

pytestmark = [pytest.mark.usefixtures("frequent_rescues"), pytest.mark.once]

ONE, TWO, THREE, FOUR = [(number,) for number in range(4)]


def test_quarantined_jobs_run_together_and_alone_after_another_crash() -> None:
    quarantine = Quarantine(at_once=2)
    quarantine.add([ONE])
    quarantine.add([ONE, TWO, THREE, FOUR], together=True)
    assert quarantine.take() == QuarantinedJob(TWO, alone=False)
    assert quarantine.take() == QuarantinedJob(THREE, alone=False)
    assert quarantine.take() is None, "two are running"
    quarantine.add([THREE], together=True)
    assert quarantine.end([TWO])
    assert quarantine.take() == QuarantinedJob(FOUR, alone=False)
    assert quarantine.end([FOUR, TWO])
    assert quarantine.take() is None, "one is running, and the other has to run alone"
    assert quarantine.end([THREE])
    assert quarantine.take() == QuarantinedJob(THREE, alone=False)
    assert quarantine.end([THREE])
    assert quarantine.take() == QuarantinedJob(ONE, alone=True)
    quarantine.add([TWO, THREE], together=True)
    assert quarantine.take() is None, "another job runs alone"
    assert quarantine.end([ONE])
    assert not quarantine.end([ONE])
    assert quarantine.waiting() == [TWO, THREE]


def test_where_one_quarantined_job_runs_at_a_time_it_is_alone() -> None:
    quarantine = Quarantine()
    quarantine.add([ONE, TWO], together=True)
    assert quarantine.take() == QuarantinedJob(ONE, alone=True)
    assert quarantine.take() is None


def mark_as_crashed(bench: Bench, keys: list[int], *, times: int = 1) -> None:
    """Write what a worker leaves behind that crashed once, or a second time with these jobs running together."""
    if bench.held:
        row = (
            "INSERT INTO sqlaqueue_crash_journal (id, queue, keys, starts) VALUES (:id, 'job', CAST(:keys AS jsonb), 0)"
        )
        for _ in range(times):
            bench.execute(row, id=uuid.uuid4(), keys=json.dumps([str(key) for key in keys]))
    else:
        token = uuid.uuid4() if times == 1 else several_quarantined_token()
        bench.execute(sa.update(bench.Job).where(bench.Job.id.in_(keys)).values(lease_token=token))


@pytest.mark.each_value
@pytest.mark.parametrize(("times", "at_once"), [(1, 3), (2, 1)])
def test_quarantined_jobs_occupy_half_of_the_handlers(bench: Bench, times: int, at_once: int) -> None:
    quarantined = bench.enqueue(7, payload="quarantined")
    mark_as_crashed(bench, quarantined, times=times)
    go_on, lock, running, most = threading.Event(), threading.Lock(), [0], [0]

    async def work(io: Any, job: Any) -> None:
        if job.payload == "quarantined":
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            await io.wait(go_on)
            with lock:
                running[0] -= 1

    with bench.consumer(work, concurrency=6).running():
        wait_until(lambda: running[0] == at_once, "that as many run at once", seconds=10)
        fresh = bench.enqueue(20)
        wait_until(lambda: bench.states()["completed"] == len(fresh))
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": len(fresh) + len(quarantined)})
    assert most == [at_once]
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def test_a_job_that_crashes_its_worker_among_quarantined_jobs(mixed: Bench) -> None:
    """No attempt is counted for the jobs that run with it; it crashes a worker once more than if one ran at a time."""
    bench = mixed
    good = bench.enqueue(3)
    [poison] = bench.enqueue(1, payload="poison", max_attempts=1)
    good += bench.enqueue(3)
    mark_as_crashed(bench, [*good, poison])
    with bench.worker("deadly", lease=1, concurrency=8, restart=True) as worker:
        wait_until(lambda: not {"pending", "processing"} & bench.states().keys())
        worker.signal(15)
        assert worker.await_end() == 0
    assert bench.states() == {"completed": 6, "failed": 1}
    assert bench.attempts() == dict.fromkeys([*good, poison], 1)
    assert len(worker.said("died")) == 2
    bench.assert_tidy()
