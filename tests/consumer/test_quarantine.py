"""After a death most suspects are innocent: several run at once, and none of them pays for it."""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer.claiming.quarantine import Suspect, Suspects
from sqlaqueue.strategies.parts.claim_tokens import several_quarantined_token
from tests.consumer.bench import Bench, wait_until

pytestmark = [pytest.mark.usefixtures("frequent_sweeps"), pytest.mark.once]

ONE, TWO, THREE, FOUR = [(number,) for number in range(4)]


def test_suspects_run_together_and_those_that_died_again_alone() -> None:
    suspects = Suspects(at_once=2)
    suspects.add([ONE])
    suspects.add([ONE, TWO, THREE, FOUR], together=True)
    assert suspects.take() == Suspect(TWO, alone=False)
    assert suspects.take() == Suspect(THREE, alone=False)
    assert suspects.take() is None, "two run already"
    suspects.add([THREE], together=True)
    assert suspects.end([TWO])
    assert suspects.take() == Suspect(FOUR, alone=False)
    assert suspects.end([FOUR, TWO])
    assert suspects.take() is None, "one is running, and the other one has to run alone"
    assert suspects.end([THREE])
    assert suspects.take() == Suspect(THREE, alone=False)
    assert suspects.end([THREE])
    assert suspects.take() == Suspect(ONE, alone=True)
    suspects.add([TWO, THREE], together=True)
    assert suspects.take() is None, "another one runs alone"
    assert suspects.end([ONE])
    assert not suspects.end([ONE])
    assert suspects.remembered() == [TWO, THREE]


def test_where_one_runs_at_a_time_it_is_alone() -> None:
    suspects = Suspects()
    suspects.add([ONE, TWO], together=True)
    assert suspects.take() == Suspect(ONE, alone=True)
    assert suspects.take() is None


def read_as_if_their_worker_had_died(bench: Bench, keys: list[int], *, times: int = 1) -> None:
    """Leave what a dead worker leaves; the second time they were running together as suspects."""
    if bench.held:
        row = (
            "INSERT INTO sqlaqueue_crash_journal (id, queue, keys, starts) VALUES (:id, 'job', CAST(:keys AS jsonb), 0)"
        )
        for _ in range(times):
            bench.execute(row, id=uuid.uuid4(), keys=json.dumps([str(key) for key in keys]))
    else:
        token = uuid.uuid4() if times == 1 else several_quarantined_token()
        bench.execute(sa.update(bench.Job).where(bench.Job.id.in_(keys)).values(lease_token=token))


@pytest.mark.parametrize(("times", "at_once"), [(1, 3), (2, 1)])
def test_half_of_the_handlers_clear_suspects_while_fresh_jobs_go_on(bench: Bench, times: int, at_once: int) -> None:
    suspects = bench.enqueue(7, payload="suspect")
    read_as_if_their_worker_had_died(bench, suspects, times=times)
    go_on, lock, at_work, most = threading.Event(), threading.Lock(), [0], [0]

    async def work(hands: Any, job: Any) -> None:
        if job.payload == "suspect":
            with lock:
                at_work[0] += 1
                most[0] = max(most[0], at_work[0])
            await hands.wait(go_on)
            with lock:
                at_work[0] -= 1

    with bench.consumer(work, concurrency=6).running():
        wait_until(lambda: at_work[0] == at_once, "that so many run at once", seconds=10)
        fresh = bench.enqueue(20)
        wait_until(lambda: bench.states()["completed"] == len(fresh))
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": len(fresh) + len(suspects)})
    assert most == [at_once]
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def test_poison_among_suspects_that_run_together(mixed: Bench) -> None:
    """Those that run with it are not blamed for its doing; it dies once more than where one runs at a time."""
    bench = mixed
    good = bench.enqueue(3)
    [poison] = bench.enqueue(1, payload="poison", max_attempts=1)
    good += bench.enqueue(3)
    read_as_if_their_worker_had_died(bench, [*good, poison])
    with bench.worker("deadly", lease=1, concurrency=8, restart=True) as worker:
        wait_until(lambda: not {"pending", "processing"} & bench.states().keys())
        worker.signal(15)
        assert worker.await_end() == 0
    assert bench.states() == {"completed": 6, "failed": 1}
    assert bench.attempts() == dict.fromkeys([*good, poison], 1)
    assert len(worker.said("died")) == 2
    bench.assert_tidy()
