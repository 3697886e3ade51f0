"""Leases: extended while a handler runs, rescued after its worker has died; and the maintenance loop that does so."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import Constant, claim
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import state
from tests.consumer.bench import LATER, Bench, Gate, Server, await_listening, for_some, idle
from tests.programs import wait_until

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("frequent_rescues")]


def beats(bench: Bench, key: int, times: int) -> Callable[[], bool]:
    """Return a condition: the lease of a job has been extended so many times since the first call."""
    ends: list[Any] = []

    def look() -> bool:
        end = bench.row(key).lease_expires_at
        if end is not None and (not ends or end > ends[-1]):
            ends.append(end)
        return len(ends) > times

    return look


@pytest.mark.usefixtures("no_job_is_late")
def test_a_lease_lives_as_long_as_its_handler(leased: Bench) -> None:
    """The leases of waiting jobs as well: none is rescued."""
    quick, keys = leased.enqueue(1, priority=-1), leased.enqueue(4, payload="slow")
    gate = Gate()

    # What was quick promises more: the claim after it takes all.
    with leased.consumer(for_some({"slow": gate}), lease=1, batch_size=4).running() as server:
        wait_until(lambda: leased.states()["processing"] == 4)
        with leased.consumer().running() as other:
            # Past the first lease's end, by the database's clock.
            end = leased.row(keys[3]).lease_expires_at
            wait_until(lambda: leased.execute("SELECT clock_timestamp() > :end", end=end))
            wait_until(beats(leased, keys[3], 3))
            gate.open()
            wait_until(lambda: leased.states() == {"completed": 5})
    assert server.told("rescued", "lease_lost") == other.told("rescued", "lease_lost", "completed") == []
    assert leased.attempts() == dict.fromkeys(quick + keys, 1)


def test_a_handler_that_locks_its_row_blocks_no_heartbeat(leased: Bench) -> None:
    """The extension skips the locked row, and extends the leases of the other jobs."""
    keys = leased.enqueue(3)

    async def write_one(io: Any, job: Any) -> None:
        if job.id == keys[0]:
            job.payload = "written"
            await io.flush()

    gate = Gate(first=write_one)

    # Longer than a busy machine may stop a process for: a lease that expires is rescued.
    with leased.consumer(gate, lease=4, concurrency=3).running() as server:
        gate.await_call(3)
        with leased.consumer().running() as other:
            end = leased.row(keys[0]).lease_expires_at
            wait_until(lambda: leased.execute("SELECT clock_timestamp() > :end", end=end))
            wait_until(beats(leased, keys[2], 2))
            gate.open()
            wait_until(lambda: leased.states() == {"completed": 3})
    assert server.told("rescued", "lease_lost") == other.told("rescued", "lease_lost", "completed") == []
    assert leased.row(keys[0]).payload == "written"


def test_another_transaction_that_locks_a_row_blocks_no_heartbeat(leased: Bench) -> None:
    """Such as a long transaction of an administrator: only the result of that job waits."""
    locked, *others = leased.enqueue(3)
    one, all_others = Gate(), Gate()
    work = for_some({locked: one} | dict.fromkeys(others, all_others))
    with leased.engine.connect() as admin, leased.consumer(work, lease=1, concurrency=3).running() as server:
        one.await_call()
        all_others.await_call(2)
        admin.execute(sa.text("SELECT FROM job WHERE id = :id FOR UPDATE"), {"id": locked})
        one.open()
        wait_until(beats(leased, others[0], 5))
        assert leased.row(locked).status == "processing"
        admin.rollback()
        all_others.open()
        wait_until(lambda: leased.states() == {"completed": 3})
    assert server.told("lease_lost") == []


@pytest.mark.parametrize("raises", [False, True])
def test_a_result_whose_row_is_locked_keeps_no_other_job_waiting(leased: Bench, *, raises: bool) -> None:
    """It is settled with the next claim, which waited for the lock, and with it all other workers for their turn."""
    (locked,) = leased.enqueue(1, payload="locked")
    gate = Gate(*[ValueError()] * raises)
    options = {"concurrency": 3, "batch_size": 1, "retry": Constant(LATER)}
    with (
        leased.consumer(for_some({"locked": gate}), **options).running(),
        leased.engine.connect() as admin,
    ):
        gate.await_call()
        admin.execute(sa.text("SELECT FROM job WHERE id = :id FOR UPDATE"), {"id": locked})
        gate.open()
        others = leased.enqueue(20)
        wait_until(lambda: leased.states()["completed"] == len(others), seconds=20)
        assert leased.row(locked).status == "processing"
        admin.rollback()
        wait_until(lambda: leased.row(locked).status == ("pending" if raises else "completed"))
    assert leased.attempts()[locked] == 1


def test_a_live_worker_comes_before_a_rescue_when_a_lock_on_its_row_ends(leased: Bench) -> None:
    """The lease has expired meanwhile; the job is rescued only if it is not extended soon after."""
    (key,) = leased.enqueue(1)
    gate = Gate()

    with leased.consumer(gate, lease=3).running() as server:
        wait_until(lambda: leased.states() == {"processing": 1})
        with leased.consumer(lease=3).running() as other:
            for _ in range(2):
                with leased.engine.begin() as connection:
                    connection.execute(sa.select(leased.Job.id).where(leased.Job.id == key).with_for_update())
                    wait_until(lambda: leased.execute("SELECT lease_expires_at < now() - interval '0.3 s' FROM job"))
                wait_until(beats(leased, key, 1))
            gate.open()
            wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("rescued", "lease_lost") == other.told("rescued", "lease_lost", "completed") == []
    assert leased.attempts() == {key: 1}


def test_a_job_whose_worker_died_is_rescued_by_another(leased: Bench) -> None:
    [key] = leased.enqueue(1)
    with leased.worker("hang", lease=1) as worker:
        worker.await_word("started")
        worker.signal(signal.SIGKILL)
        worker.await_end()
        with leased.consumer().running() as server:
            # At the latest when the lease has expired and the next rescue is due.
            wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("rescued") == [key]
    # Nothing else ran there, so the attempt counts.
    assert leased.row(key).attempts == 2


def test_a_consumer_rescues_jobs_of_an_earlier_process(leased: Bench) -> None:
    """Though the queue is busy."""
    [key] = leased.enqueue(1)
    leased.execute(
        "UPDATE job SET status = 'processing', attempts = 1, lease_token = gen_random_uuid(),"
        " lease_expires_at = clock_timestamp() - interval '1 s'"
    )
    leased.enqueue(200)

    async def work(io: Any, job: Any) -> None:
        # There is always more to do.
        await io.execute(sa.insert(leased.Job.__table__).values(payload=None))

    with leased.consumer(work, batch_size=5, concurrency=2).running():
        wait_until(lambda: leased.row(key).status == "completed")


def test_a_process_that_was_stopped_beyond_its_lease_changes_nothing(leased: Bench) -> None:
    """When it continues it writes nothing, and logs that the lease is lost."""
    [key] = leased.enqueue(1)
    with leased.worker("wait", lease=1) as zombie:
        zombie.await_word("started")
        zombie.signal(signal.SIGSTOP)
        with leased.consumer().running() as server:
            wait_until(lambda: leased.states() == {"completed": 1})
        assert server.told("completed") == [key]
        before = leased.row(key)
        zombie.write("go on")
        zombie.signal(signal.SIGCONT)
        zombie.await_word(f"lease_lost {key}")
        assert zombie.said("completed") == []
    assert leased.row(key) == before
    # Its handler had an effect, which went with its result.
    assert not leased.effects()


def test_a_stale_result_without_writes_is_refused(leased: Bench) -> None:
    [key] = leased.enqueue(1)
    gate = Gate()
    with leased.consumer(gate).running() as server:
        gate.await_call()
        token = "UPDATE job SET lease_token = gen_random_uuid(), claimed_by = 'the thief'"
        leased.execute(token)
        before = leased.row(key)
        gate.open()
        wait_until(lambda: server.told("lease_lost") == [key])
    assert leased.row(key) == before
    assert server.told("completed") == []


def test_of_a_batch_only_the_job_with_the_lost_lease_is_refused(leased: Bench) -> None:
    """The other jobs were in the same transaction, so they run again without a counted attempt."""
    lost, *others = leased.enqueue(4)
    calls: list[list[int]] = []

    async def work(io: Any, jobs: Any) -> None:
        calls.append([job.id for job in jobs])
        for job in jobs:
            await io.execute(leased.effect(job.id))
        if len(calls) == 1:
            # Beside the handler's own transaction, as a thief does it.
            leased.execute("UPDATE job SET lease_token = gen_random_uuid() WHERE id = :id", id=lost)

    server = leased.consumer(work, batch=True)
    server.drain()
    assert server.told("lease_lost") == [lost]
    assert leased.effects() == dict.fromkeys(others, 1)
    assert {leased.row(key).attempts for key in others} == {1}
    assert leased.row(lost).status == "processing"


def test_a_crash_during_several_claims_counts_no_attempt(leased: Bench) -> None:
    """A job of one claim may be responsible, or one of another claim."""
    keys = leased.enqueue(3)
    with leased.worker("hang", lease=1, concurrency=3, batch_size=1) as worker:
        worker.await_word("started", times=3)
        worker.signal(signal.SIGKILL)
        worker.await_end()
        with leased.consumer().running() as server:
            wait_until(lambda: leased.states() == {"completed": 3})
    assert sorted(server.told("rescued")) == keys
    assert set(leased.attempts().values()) == {1}


# -- the maintenance loop of an idle Consumer sleeps until it is woken; here no timer would wake it ----------------


@pytest.fixture
def sleeps_at_once(frequent_rescues: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what the other tests need, and let it sleep."""
    monkeypatch.setattr(state, "_SLEEPS_AFTER", 0.0)
    for interval in ("RESCUE", "HEARTBEAT", "RECONCILE"):
        monkeypatch.setattr(pace, interval, LATER)


def await_sleep(server: Server) -> None:
    await_listening(server)
    context = server.context
    assert context is not None
    wait_until(lambda: context.maintenance_sleeps and context.busy_since is None)


@pytest.mark.usefixtures("sleeps_at_once")
def test_a_claimed_job_wakes_it(leased: Bench) -> None:
    """The lease of the job is extended, though it is far shorter than the sleep."""
    gate = Gate()

    with leased.consumer(gate, lease=1, poll_interval=LATER).running() as server:
        await_sleep(server)
        [key] = leased.enqueue()
        wait_until(beats(leased, key, 3))
        gate.open()
        wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("rescued", "lease_lost") == []


@pytest.mark.usefixtures("sleeps_at_once")
def test_expired_leases_are_rescued_without_a_notification(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has died sends none: the rescue timer wakes the loop."""
    monkeypatch.setattr(pace, "RESCUE", 0.5)
    with idle(leased).running() as server:
        await_sleep(server)
        # Twice: the notification of the first rescue sets the timer again.
        for number in (1, 2):
            with leased.sessions() as session:
                session.add(leased.Job())
                session.flush()
                job = session.execute(claim(leased.Job, 1)).scalars().one()
                job.lease_expires_at = sa.func.now() - sa.text("interval '1 s'")
                session.commit()
            wait_until(lambda number=number: leased.states() == {"completed": number})
    assert list(leased.attempts().values()) == [2, 2]


@pytest.mark.usefixtures("sleeps_at_once")
def test_a_lost_connection_wakes_it(mixed: Bench) -> None:
    """It sends another heartbeat, which shows whether the next connection receives notifications."""
    with idle(mixed).running() as server:
        await_sleep(server)
        assert mixed.database.kill_backends() > 0
        wait_until(lambda: not server.context.polls.peers.listening)
        await_listening(server)


@pytest.mark.usefixtures("sleeps_at_once")
def test_a_row_that_was_locked_at_the_last_extension_keeps_no_idle_loop_awake(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased.enqueue()
    passed_over, rounds = threading.Event(), list[float]()

    async def work(io: Any, job: Any) -> None:
        job.payload = "written"
        await io.flush()
        await io.wait(passed_over)

    until_next = state.Maintenance.until_next

    def count(maintenance: state.Maintenance) -> float:
        if maintenance.locked:
            passed_over.set()
        wait = until_next(maintenance)
        rounds.append(wait)
        return wait

    monkeypatch.setattr(state.Maintenance, "until_next", count)
    with leased.consumer(work, lease=1, poll_interval=LATER).running() as server:
        wait_until(lambda: leased.states() == {"completed": 1})
        await_sleep(server)
        rounds.clear()
        assert passed_over.wait(0)
        # Some rounds are for the notifications of this moment; an overdue timer causes fifty in each second.
        time.sleep(1)
        assert len(rounds) < 20
