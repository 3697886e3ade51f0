"""Jobs that one worker runs in one session, as long as handlers do not use it: only the speed differs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlaqueue.consumer import leased as leased_routines
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.exc import LeaseLost
from tests.consumer.bench import Bench
from tests.programs import wait_until

N, BATCH = 60, 20
"""Jobs, and how many are claimed at once: by the third claim it is known that the handler does not use its session."""


@pytest.fixture(autouse=True)
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one worker run the jobs of a claim that do not use the session, however slow this machine is at the moment."""
    monkeypatch.setattr(pace, "_IN_ROW_ALONE", 60.0)
    monkeypatch.setattr(pace, "_IN_ROW_AMONG_OTHERS", 60.0)


@pytest.fixture
def transactions() -> Iterator[Counter[str]]:
    """Count the transactions that sessions begin."""
    counts: Counter[str] = Counter()

    def begun(session: Session, transaction: Any) -> None:
        counts["begun"] += transaction.parent is None

    event.listen(Session, "after_transaction_create", begun)
    yield counts
    event.remove(Session, "after_transaction_create", begun)


def test_handlers_that_do_not_use_their_session_share_it(bench: Bench) -> None:
    bench.enqueue(N)
    seen: list[tuple[Session, str]] = []

    async def read(io: Any, job: Any) -> None:
        seen.append((io.session, job.payload))

    assert bench.consumer(read, batch_size=BATCH).drain() == N
    assert len(seen) == N
    # After the first claims nothing is known yet, and each of their jobs has a session of its own.
    assert len({id(session) for session, _ in seen[N // 2 :]}) <= N // BATCH
    assert bench.states() == {"completed": N}
    bench.assert_tidy()


@pytest.mark.each_value
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_handler_may_end_its_session(leased: Bench, end: str) -> None:
    """The next job is complete, though the session that loaded it has ended, and what is written to it is kept."""
    keys = leased.enqueue(N, payload="as it was")
    ended, written = keys[N // 2 :: 7], keys[N // 2 + 1 :: 7]

    async def work(io: Any, job: Any) -> None:
        assert job.payload == "as it was"
        if job.id in ended:
            await io.execute(leased.effect(job.id))
            await getattr(io, end)()
        elif job.id in written:
            job.payload = "written"

    server = leased.consumer(work, batch_size=BATCH)
    assert server.drain() == N
    assert leased.states() == {"completed": N}, server.told()
    assert {key for key, row in leased.rows().items() if row.payload == "written"} == {*written}
    assert leased.effects() == (dict.fromkeys(ended, 1) if end == "commit" else {})
    leased.assert_tidy()


def test_a_handler_may_expire_all_instances(bench: Bench) -> None:
    keys = bench.enqueue(N, payload="as it was")

    async def expire(io: Any, job: Any) -> None:
        assert job.payload == "as it was"
        if job.id in keys[N // 2 :: 7]:
            io.session.expire_all()

    assert bench.consumer(expire, batch_size=BATCH).drain() == N
    assert bench.states() == {"completed": N}
    bench.assert_tidy()


def test_writes_are_committed_with_their_own_job(bench: Bench) -> None:
    keys = bench.enqueue(N)
    writers, failing = set(keys[N // 2 :: 5]), set(keys[N // 2 + 1 :: 5])

    async def work(io: Any, job: Any) -> None:
        if job.id in writers | failing:
            io.session.add(bench.Effect(job=job.id))
            job.payload = "written"
        if job.id in failing:
            raise ValueError

    assert bench.consumer(work, batch_size=BATCH, retry=lambda attempt, error: None).drain() == N
    assert bench.effects() == dict.fromkeys(writers, 1)
    assert bench.states() == Counter(completed=N - len(failing), failed=len(failing))
    if bench.has_status:
        assert {key for key, row in bench.rows().items() if row.payload == "written"} == writers
    bench.assert_tidy()


def test_a_handler_may_change_the_jobs_that_come_after_it(leased: Bench) -> None:
    """They are in its session, as other rows that it loads; to run them does not undo the change."""
    keys = leased.enqueue(N)

    async def work(io: Any, job: Any) -> None:
        if job.id == keys[N // 2]:
            following = sa.select(leased.Job).where(leased.Job.id > job.id).limit(N)
            for other in (await io.execute(following)).scalars():
                other.payload = "changed by another"

    assert leased.consumer(work, batch_size=BATCH).drain() == N
    assert all(row.payload == "changed by another" for key, row in leased.rows().items() if key > keys[N // 2])


def test_no_job_waits_behind_a_handler_that_is_suddenly_slow(leased: Bench) -> None:
    keys = leased.enqueue(2 * N)
    slow, go_on, done = keys[N], threading.Event(), list[int]()

    async def work(io: Any, job: Any) -> None:
        if job.id == slow:
            await io.wait(go_on)
        done.append(job.id)

    with leased.consumer(work, concurrency=2, batch_size=N // 2).running() as server:
        wait_until(lambda: len(done) == 2 * N - 1)
        assert slow not in done
        # Runs that have ended are settled, though their worker is busy.
        wait_until(lambda: leased.states()["completed"] == 2 * N - 1)
        go_on.set()
        wait_until(lambda: leased.states()["completed"] == 2 * N)
    assert Counter(done) == dict.fromkeys(keys, 1)
    assert server.told("completed")
    assert not server.told("released", "lease_lost")


def test_a_job_whose_lease_was_lost_meanwhile_is_not_run(leased: Bench) -> None:
    """The waiting jobs of an executor are loaded again, except those that another worker has claimed."""
    keys = leased.enqueue(N)
    thief, stolen = keys[N // 2 : N // 2 + 2]
    seen: list[int] = []

    async def work(io: Any, job: Any) -> None:
        seen.append(job.id)
        if job.id == thief:
            leased.execute(
                f"UPDATE {leased.Job.__table__.name} SET lease_token = gen_random_uuid() WHERE id = {stolen}"
            )
            await io.execute(leased.effect(job.id))

    with leased.consumer(work, batch_size=BATCH).running() as server:
        wait_until(lambda: server.told("lease_lost") and leased.states()["completed"] == N - 1)
    assert server.told("lease_lost") == [stolen]
    assert stolen not in seen
    assert isinstance(next(one.error for one in server.events if one.name == "lease_lost"), LeaseLost)


@pytest.mark.parametrize("why", ["a used session", "a slow handler"])
def test_jobs_that_cannot_be_passed_on_are_released(leased: Bench, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """They do not wait until their leases expire."""
    keys = leased.enqueue(2 * N)
    special, go_on, failures = keys[N + 10], threading.Event(), list[int]()
    load_again = leased_routines.load_again

    def fail_once(*arguments: Any) -> Any:
        if not failures:
            failures.append(1)
            raise OperationalError("SELECT", {}, Exception("the connection is gone"))
        return load_again(*arguments)

    monkeypatch.setattr(leased_routines, "load_again", fail_once)

    async def work(io: Any, job: Any) -> None:
        if job.id == special and why == "a used session":
            await io.execute(leased.effect(job.id))
        elif job.id == special:
            await io.wait(go_on)

    with leased.consumer(work, concurrency=2, batch_size=N // 2, lease=600).running():
        wait_until(lambda: failures)
        go_on.set()
        wait_until(lambda: leased.states()["completed"] == 2 * N)


def test_a_job_that_does_not_use_its_session_costs_no_transaction(leased: Bench, transactions: Counter[str]) -> None:
    leased.enqueue(5 * N)
    server = leased.consumer(batch_size=N)
    with server.running():
        wait_until(lambda: leased.states()["completed"] >= N)
        began = transactions["begun"]
        leased.enqueue(4 * N)
        wait_until(lambda: leased.states()["completed"] == 9 * N)
    assert transactions["begun"] - began < 4 * N


def test_a_drain_does_not_end_while_another_worker_claims(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that this claim has locked are known to the database only."""
    claim, at_once = Claimer.claim, [0, 0]

    def claim_slowly(self: Claimer, session: Session, *arguments: Any) -> Any:
        at_once[0] += 1
        at_once[1] = max(at_once)
        claimed = claim(self, session, *arguments)
        if claimed[0]:
            session.execute(sa.text("SELECT pg_sleep(0.05)"))
        at_once[0] -= 1
        return claimed

    monkeypatch.setattr(Claimer, "claim", claim_slowly)
    bench.enqueue(N)
    assert bench.consumer(concurrency=2, batch_size=10).drain() == N
    assert at_once[1] == 2
    assert bench.states() == {"completed": N}
