"""Jobs that one worker runs in one session, and claimed jobs that are released, as they would wait for long."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlaqueue import cancel, consumers
from sqlaqueue.consumer import leased as leased_routines
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.in_flight import run_of_claimed
from sqlaqueue.consumer.leased import Report, apply
from sqlaqueue.consumer.maintenance import handlers_running, state
from sqlaqueue.consumer.maintenance.handlers_running import late_groups, release_late
from sqlaqueue.consumer.pace import LATE, LONGEST_IN_BUFFER
from sqlaqueue.exc import LeaseLost
from sqlaqueue.mapping.runs import set_run
from sqlaqueue.queue.run import Run
from tests.consumer.bench import Bench, Gate, for_some, noting
from tests.consumer.models import models
from tests.contexts import make_context
from tests.programs import wait_until

N, BATCH = 60, 20
"""Jobs, and how many are claimed at once: by the fourth claim it is known that the handler does not use its session."""


@pytest.fixture
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one worker run the jobs of a claim that do not use the session, however slow this machine is at the moment."""
    monkeypatch.setattr(pace, "_IN_ROW_ALONE", 60.0)
    monkeypatch.setattr(pace, "_IN_ROW_AMONG_OTHERS", 60.0)
    monkeypatch.setattr(pace, "_BUFFERED_WORK", 60.0)
    monkeypatch.setattr(pace, "LATE", 600.0)


@pytest.fixture
def transactions() -> Iterator[Counter[str]]:
    """Count the transactions that sessions begin."""
    counts: Counter[str] = Counter()

    def begun(session: Session, transaction: Any) -> None:
        counts["begun"] += transaction.parent is None

    event.listen(Session, "after_transaction_create", begun)
    yield counts
    event.remove(Session, "after_transaction_create", begun)


@pytest.mark.usefixtures("long_rows")
def test_handlers_that_do_not_use_their_session_share_it(bench: Bench) -> None:
    bench.enqueue(N)
    seen: list[tuple[Session, str]] = []
    read = noting(seen, lambda io, job: (io.session, job.payload))
    assert bench.consumer(read, batch_size=BATCH).drain() == N
    assert len(seen) == N
    # After the first claims nothing is known yet, and each of their jobs has a session of its own.
    assert len({id(session) for session, _ in seen[N // 2 :]}) <= N // BATCH
    bench.expect({"completed": N})


@pytest.mark.usefixtures("long_rows")
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
    leased.expect(effects=(dict.fromkeys(ended, 1) if end == "commit" else {}))


@pytest.mark.usefixtures("long_rows")
def test_a_handler_may_expire_all_instances(bench: Bench) -> None:
    keys = bench.enqueue(N, payload="as it was")

    async def expire(io: Any, job: Any) -> None:
        assert job.payload == "as it was"
        if job.id in keys[N // 2 :: 7]:
            io.session.expire_all()

    assert bench.consumer(expire, batch_size=BATCH).drain() == N
    bench.expect({"completed": N})


@pytest.mark.usefixtures("long_rows")
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
    bench.expect(Counter(completed=N - len(failing), failed=len(failing)), effects=writers)
    if bench.has_status:
        assert {key for key, row in bench.rows().items() if row.payload == "written"} == writers
    bench.assert_tidy()


@pytest.mark.usefixtures("long_rows")
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


@pytest.mark.usefixtures("long_rows")
def test_no_job_waits_behind_a_handler_that_is_suddenly_slow(leased: Bench) -> None:
    keys = leased.enqueue(2 * N)
    slow, gate, done = keys[N], Gate(), list[int]()

    async def work(io: Any, job: Any) -> None:
        if job.id == slow:
            await gate(io, job)
        done.append(job.id)

    with leased.consumer(work, concurrency=2, batch_size=N // 2).running() as server:
        wait_until(lambda: len(done) == 2 * N - 1)
        assert slow not in done
        # Runs that have ended are settled, though their worker is busy.
        wait_until(lambda: leased.states()["completed"] == 2 * N - 1)
        gate.open()
        wait_until(lambda: leased.states()["completed"] == 2 * N)
    assert Counter(done) == dict.fromkeys(keys, 1)
    assert server.told("completed")
    assert not server.told("released", "lease_lost")


@pytest.mark.usefixtures("long_rows", "no_job_is_late")
def test_a_job_whose_lease_was_lost_meanwhile_is_not_run(leased: Bench) -> None:
    """The waiting jobs of an executor are loaded again, except those that another worker has claimed."""
    keys = leased.enqueue(N)
    # In the middle of the fourth claim: the first ones take 1, 15 and 20 jobs.
    thief, stolen = keys[45:47]
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


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("why", ["a used session", "a slow handler"])
def test_jobs_that_cannot_be_passed_on_are_released(leased: Bench, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """They do not wait until their leases expire."""
    keys = leased.enqueue(2 * N)
    special, gate, failures = keys[N + 10], Gate(), list[int]()
    load_again = leased_routines.load_again

    def fail_once(*arguments: Any) -> Any:
        if not failures:
            failures.append(1)
            raise OperationalError("SELECT", {}, Exception("the connection is gone"))
        return load_again(*arguments)

    monkeypatch.setattr(leased_routines, "load_again", fail_once)

    work = for_some({special: leased.work if why == "a used session" else gate})
    with leased.consumer(work, concurrency=2, batch_size=N // 2, lease=600).running():
        wait_until(lambda: failures)
        gate.open()
        wait_until(lambda: leased.states()["completed"] == 2 * N)


@pytest.mark.usefixtures("long_rows")
def test_a_job_that_does_not_use_its_session_costs_no_transaction(leased: Bench, transactions: Counter[str]) -> None:
    leased.enqueue(5 * N)
    server = leased.consumer(batch_size=N)
    with server.running():
        wait_until(lambda: leased.states()["completed"] >= N)
        began = transactions["begun"]
        leased.enqueue(4 * N)
        wait_until(lambda: leased.states()["completed"] == 9 * N)
    assert transactions["begun"] - began < 4 * N


@pytest.mark.usefixtures("long_rows")
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


# -- claimed jobs that would wait for long behind slow ones are released, and other consumers run them -------------
JOB = models("update_status").job
MANY, HEAD = 60, 10


def test_quick_jobs_do_not_wait_behind_a_slow_one(leased: Bench) -> None:
    """Where another Consumer is idle. A Consumer with several handlers releases jobs when all of them are busy."""
    concurrency = 1 if leased.api == "sync" else 2
    keys = leased.enqueue(HEAD + concurrency + MANY)
    slow, gate = keys[HEAD : HEAD + concurrency], Gate()
    with leased.consumer(for_some(dict.fromkeys(slow, gate)), concurrency=concurrency).running() as busy:
        gate.await_call(len(slow))
        with leased.consumer().running() as idle:
            wait_until(lambda: leased.states() == {"completed": len(keys) - len(slow), "processing": len(slow)})
        gate.open()
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert set(leased.attempts().values()) == {1}
    released = busy.told("released")
    assert released
    assert set(released) <= set(idle.told("completed"))
    assert busy.told()["released"] == len(set(released)), "the same Consumer does not claim a released job again"
    assert not busy.told("lease_lost")


_UPDATES = "SELECT coalesce(sum(n_tup_upd), 0) FROM pg_stat_user_tables WHERE relid = CAST(:table AS regclass)"


def test_a_drain_of_mixed_durations_updates_each_job_about_twice(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim and settlement: few jobs are released behind slow ones and claimed again. All times are a sixth."""
    for name in ("LATE", "LONGEST_IN_BUFFER", "_BUFFERED_WORK"):
        monkeypatch.setattr(pace, name, getattr(pace, name) / 6)
    for name in ("LATE", "LONGEST_IN_BUFFER"):
        monkeypatch.setattr(handlers_running, name, getattr(pace, name))
    monkeypatch.setattr(state, "_PAUSE_BUSY", state._PAUSE_BUSY / 6)
    number, table = 2500, leased.Job.__tablename__
    slow = set[int]()

    async def work(io: Any, job: Any) -> None:
        if job.id in slow:
            until = time.monotonic() + 0.05
            await io.wait_for(lambda: time.monotonic() >= until)

    def drained() -> float:
        """Drain new jobs, and return the updates of each."""
        old = {*leased.rows()}
        leased.execute(sa.insert(leased.Job).values([{"payload": None}] * number))
        slow.update(random.Random(1).sample(sorted({*leased.rows()} - old), number // 50))
        before = leased.execute(_UPDATES, table=table)
        assert leased.consumer(work).drain() == number
        # The server counts the updates of a connection when it ends.
        wait_until(lambda: leased.execute(_UPDATES, table=table) - before >= 2 * number)
        return float(leased.execute(_UPDATES, table=table) - before) / number

    # A drain whose process has to wait for a processor may release more; none of three does with as few otherwise.
    found = [drained()]
    while found[-1] >= 2.3 and len(found) < 3:
        found.append(drained())
    assert min(found) < 2.3, found


def test_a_request_to_cancel_is_not_lost_with_a_released_job(leased: Bench) -> None:
    """It was meant for this run of the job."""
    keys = leased.enqueue(HEAD + 3)
    slow, requested, last = keys[HEAD:]

    async def request(io: Any, job: Any) -> None:
        leased.in_session(cancel(sa.select(leased.Job).where(leased.Job.id == requested)))

    gate = Gate(first=request)
    with leased.consumer(for_some({slow: gate})).running():
        gate.await_call()
        wait_until(lambda: leased.row(requested).status == "cancelled" and leased.row(last).status == "pending")
        gate.open()
    assert leased.row(slow).status == "completed"


def test_a_held_batch_ends_when_it_takes_longer_than_expected(
    supply: Any, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs that have not begun are free with its commit, and other consumers are notified."""
    monkeypatch.setattr(pace, "LATE", 0.2)
    bench = supply.take("delete_returning" if api == "sync" else "batch_select", api)
    keys = bench.enqueue(HEAD + 1 + MANY)
    gate = Gate()
    with bench.consumer(bench.doing({keys[HEAD]: gate})).running() as server:
        gate.await_call()
        held_up = time.monotonic()
        wait_until(lambda: time.monotonic() - held_up > pace.LATE)
        gate.open()
        wait_until(lambda: bench.states() == {"completed": len(keys)})
    assert server.told("released")
    bench.expect(attempts=1, effects=keys)


@pytest.mark.usefixtures("no_job_is_late")
def test_consumers_report_running_and_waiting_jobs(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "HEARTBEAT", 0.2)
    keys = leased.enqueue(HEAD + 3)
    slow, gate = keys[HEAD], Gate()

    def seen() -> Any:
        with leased.sessions() as session:
            return [(row.running, row.claimed) for row in session.execute(consumers(leased.Job))]

    with leased.consumer(for_some({slow: gate})).running():
        wait_until(lambda: seen() == [([[str(slow)]], 2)])
        gate.open()
        wait_until(lambda: leased.states() == {"completed": len(keys)})


def job(key: int) -> Any:
    claimed = models("update_status").job(id=key)
    set_run(claimed, Run((key,), None, 1, 5))
    return claimed


@pytest.fixture
def calls() -> Iterator[contextlib.ExitStack]:
    """The calls of handlers that last as long as the test."""
    with contextlib.ExitStack() as calls:
        yield calls


def begin_call(calls: contextlib.ExitStack, context: ConsumerContext, *keys: int) -> Executor:
    """Return an executor that has begun the first of these jobs, while the other ones wait."""
    executor = Executor(context, [[job(key)] for key in keys], context.completions.add)
    context.in_flight.calls_begin(executor)
    calls.callback(context.in_flight.calls_end, executor)
    assert executor.begin_call(Session()) is not None
    return executor


@pytest.mark.once
def test_waiting_jobs_are_released_when_all_handlers_are_busy(calls: contextlib.ExitStack) -> None:
    context = make_context(JOB, concurrency=2, duration=0.1)
    busy, now = begin_call(calls, context, 1, 2), time.monotonic()
    context.add_jobs([[job(3)]])
    assert not late_groups(context, now + LONGEST_IN_BUFFER), "the other handler takes it"
    begin_call(calls, context, 4)
    assert not late_groups(context, now), "they may end in a moment"
    assert [one.id for [one] in late_groups(context, now + 1.1 * LONGEST_IN_BUFFER)] == [3, 2]
    context.cancelled.add((2,))
    assert release_late(context, now + 1.1 * LONGEST_IN_BUFFER) == 2
    finished = context.completions.take()
    assert {one.run.key: one.outcome.event for one in finished} == {(3,): "released", (2,): "cancelled"}
    assert not context.buffer
    assert busy.is_done
    assert {run.key for run in context.in_flight.running()} == {(1,), (4,)}


@pytest.mark.once
def test_waiting_jobs_are_released_when_they_wait_longer_than_expected() -> None:
    """However quick each handler is; and at once when the Consumer stops."""
    context = make_context(JOB, concurrency=2, duration=0.1)
    context.add_jobs([[job(1)]])
    now = time.monotonic()
    assert not late_groups(context, now + 0.9 * LATE)
    assert late_groups(context, now + 1.1 * LATE)
    assert not late_groups(context, now)
    context.stopping = True
    assert late_groups(context, now)


@pytest.mark.once
def test_the_jobs_of_a_failed_batch_are_not_released(calls: contextlib.ExitStack) -> None:
    """They would be claimed as a batch again, and fail as a batch, before they are tried one by one."""
    context, failed = make_context(JOB, concurrency=1, duration=0.1), job(1)
    run_of_claimed(failed).handler_started_at = time.monotonic()
    apply(context, Report(retry_alone=[failed]))
    begin_call(calls, context, 2)
    assert not late_groups(context, time.monotonic() + 10 * LATE)
    assert context.buffer
