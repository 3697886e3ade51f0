"""Jobs that one thread or task runs in one session: nobody can tell but by the speed."""

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

from sqlaqueue.consumer.claiming import batch_size, claim_jobs
from sqlaqueue.consumer.claiming.batch_size import Pace
from sqlaqueue.consumer.executing import job_instances
from sqlaqueue.exc import LeaseLost
from tests.consumer.bench import Bench, wait_until

N, HAND = 60, 20
"""Jobs, and how many are claimed at once: by the third claim it is known that the handler leaves no trace."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that leave no trace taken for quick, however slow this machine is at the moment."""
    monkeypatch.setattr(batch_size, "_ALONE", 60.0)
    monkeypatch.setattr(batch_size, "_AMONG_OTHERS", 60.0)


@pytest.fixture
def made() -> Iterator[Counter[str]]:
    """Count the transactions that sessions begin."""
    counts: Counter[str] = Counter()

    def begun(session: Session, transaction: Any) -> None:
        counts["begun"] += transaction.parent is None

    event.listen(Session, "after_transaction_create", begun)
    yield counts
    event.remove(Session, "after_transaction_create", begun)


def test_quiet_handlers_share_a_session(bench: Bench) -> None:
    bench.enqueue(N)
    seen: list[tuple[Session, str]] = []

    async def read(hands: Any, job: Any) -> None:
        seen.append((hands.session, job.payload))

    assert bench.consumer(read, batch_size=HAND).drain() == N
    assert len(seen) == N
    # The first claims are careful, and every job of these has a session of its own.
    assert len({id(session) for session, _ in seen[N // 2 :]}) <= N // HAND
    assert bench.states() == {"completed": N}
    bench.assert_tidy()


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_what_a_handler_does_to_its_session_is_its_own_affair(leased: Bench, end: str) -> None:
    """The next job is whole, whoever has ended the session that it was loaded in, and what is written to it is kept."""
    keys = leased.enqueue(N, payload="as it was")
    spoilt, written = keys[N // 2 :: 7], keys[N // 2 + 1 :: 7]

    async def spoil(hands: Any, job: Any) -> None:
        assert job.payload == "as it was"
        if job.id in spoilt:
            await hands.execute(leased.effect(job.id))
            await getattr(hands, end)()
        elif job.id in written:
            job.payload = "written"

    server = leased.consumer(spoil, batch_size=HAND)
    assert server.drain() == N
    assert leased.states() == {"completed": N}, server.told()
    assert {key for key, row in leased.rows().items() if row.payload == "written"} == {*written}
    assert leased.effects() == (dict.fromkeys(spoilt, 1) if end == "commit" else {})
    leased.assert_tidy()


def test_a_handler_may_expire_all_instances(bench: Bench) -> None:
    keys = bench.enqueue(N, payload="as it was")

    async def expire(hands: Any, job: Any) -> None:
        assert job.payload == "as it was"
        if job.id in keys[N // 2 :: 7]:
            hands.session.expire_all()

    assert bench.consumer(expire, batch_size=HAND).drain() == N
    assert bench.states() == {"completed": N}
    bench.assert_tidy()


def test_writes_are_committed_with_their_own_job(bench: Bench) -> None:
    keys = bench.enqueue(N)
    writers, failing = set(keys[N // 2 :: 5]), set(keys[N // 2 + 1 :: 5])

    async def work(hands: Any, job: Any) -> None:
        if job.id in writers | failing:
            hands.session.add(bench.Effect(job=job.id))
            job.payload = "written"
        if job.id in failing:
            raise ValueError

    assert bench.consumer(work, batch_size=HAND, retry=lambda attempt, error: None).drain() == N
    assert bench.effects() == dict.fromkeys(writers, 1)
    assert bench.states() == Counter(completed=N - len(failing), failed=len(failing))
    if bench.has_status:
        assert {key for key, row in bench.rows().items() if row.payload == "written"} == writers
    bench.assert_tidy()


def test_a_handler_may_change_the_jobs_that_come_after_it(leased: Bench) -> None:
    """They are in its session, as anything that it loads; they are not undone by being run."""
    keys = leased.enqueue(N)

    async def work(hands: Any, job: Any) -> None:
        if job.id == keys[N // 2]:
            following = sa.select(leased.Job).where(leased.Job.id > job.id).limit(N)
            for mate in (await hands.execute(following)).scalars():
                mate.payload = "changed by another"

    assert leased.consumer(work, batch_size=HAND).drain() == N
    assert all(row.payload == "changed by another" for key, row in leased.rows().items() if key > keys[N // 2])


def test_nobody_waits_behind_a_handler_that_is_suddenly_slow(leased: Bench) -> None:
    keys = leased.enqueue(2 * N)
    slow, go_on, done = keys[N], threading.Event(), list[int]()

    async def work(hands: Any, job: Any) -> None:
        if job.id == slow:
            await hands.wait(go_on)
        done.append(job.id)

    with leased.consumer(work, concurrency=2, batch_size=N // 2).running() as server:
        wait_until(lambda: len(done) == 2 * N - 1)
        assert slow not in done
        # What has ended is settled as well, whoever has it in hand.
        wait_until(lambda: leased.states()["completed"] == 2 * N - 1)
        go_on.set()
        wait_until(lambda: leased.states()["completed"] == 2 * N)
    assert Counter(done) == dict.fromkeys(keys, 1)
    assert server.told("completed")
    assert not server.told("released", "lease_lost")


def test_a_job_that_somebody_else_has_by_now_is_refused(leased: Bench) -> None:
    """What is left of a hand is loaded again, but not what has been taken from it."""
    keys = leased.enqueue(N)
    thief, stolen = keys[N // 2 : N // 2 + 2]
    seen: list[int] = []

    async def work(hands: Any, job: Any) -> None:
        seen.append(job.id)
        if job.id == thief:
            leased.execute(
                f"UPDATE {leased.Job.__table__.name} SET lease_token = gen_random_uuid() WHERE id = {stolen}"
            )
            await hands.execute(leased.effect(job.id))

    with leased.consumer(work, batch_size=HAND).running() as server:
        wait_until(lambda: server.told("lease_lost") and leased.states()["completed"] == N - 1)
    assert server.told("lease_lost") == [stolen]
    assert stolen not in seen
    assert isinstance(next(one.error for one in server.events if one.name == "lease_lost"), LeaseLost)


@pytest.mark.parametrize("why", ["a trace", "a slow handler"])
def test_what_cannot_be_passed_on_is_given_back(leased: Bench, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """It does not wait for the end of a lease that nobody extends."""
    keys = leased.enqueue(2 * N)
    special, go_on, failures = keys[N + 10], threading.Event(), list[int]()
    load_again = job_instances.load_again

    def fail_once(*arguments: Any) -> Any:
        if not failures:
            failures.append(1)
            raise OperationalError("SELECT", {}, Exception("the connection is gone"))
        return load_again(*arguments)

    monkeypatch.setattr(job_instances, "load_again", fail_once)

    async def work(hands: Any, job: Any) -> None:
        if job.id == special and why == "a trace":
            await hands.execute(leased.effect(job.id))
        elif job.id == special:
            await hands.wait(go_on)

    with leased.consumer(work, concurrency=2, batch_size=N // 2, lease=600).running():
        wait_until(lambda: failures)
        go_on.set()
        wait_until(lambda: leased.states()["completed"] == 2 * N)


def test_a_quiet_job_costs_no_transaction(leased: Bench, made: Counter[str]) -> None:
    leased.enqueue(5 * N)
    server = leased.consumer(batch_size=N)
    with server.running():
        wait_until(lambda: leased.states()["completed"] >= N)
        began = made["begun"]
        leased.enqueue(4 * N)
        wait_until(lambda: leased.states()["completed"] == 9 * N)
    assert made["begun"] - began < 4 * N


def test_when_one_lane_keeps_what_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "_ALONE", 0.1)
    its = Pace(100, 1, 1.0)
    assert its.at_one_go(1)
    assert its.at_one_go(2) is None
    for _ in range(100):
        its.ended(0.0001, quiet=True)
    assert its.at_one_go(100)
    assert its.at_one_go(5000), "what is not done in time is passed on"
    its.ended(0.0001, quiet=False)
    assert its.at_one_go(100) is None
    assert its.at_one_go(1)
    for _ in range(100):
        its.ended(0.02, quiet=True)
    assert its.at_one_go(4)
    assert its.at_one_go(100) is None, "others could help"


def test_a_drain_does_not_end_while_another_lane_claims(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that claim has locked is nowhere yet but in the database."""
    claim, at_once = claim_jobs.claim, [0, 0]

    def claim_slowly(session: Session, *arguments: Any) -> Any:
        at_once[0] += 1
        at_once[1] = max(at_once)
        jobs, more = claim(session, *arguments)
        if jobs:
            session.execute(sa.text("SELECT pg_sleep(0.05)"))
        at_once[0] -= 1
        return jobs, more

    monkeypatch.setattr(claim_jobs, "claim", claim_slowly)
    bench.enqueue(N)
    assert bench.consumer(concurrency=2, batch_size=10).drain() == N
    assert at_once[1] == 2
    assert bench.states() == {"completed": N}
