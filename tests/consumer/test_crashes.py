"""Crashed workers: jobs that crash them, the quarantine of the others, the crash journal, and handlers that fork."""

import json
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlaqueue.consumer import held as held_routines
from sqlaqueue.consumer import leased as leased_routines
from sqlaqueue.consumer import pace, quarantine
from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.consumer.core.waker import _cancel
from sqlaqueue.consumer.quarantine import Quarantine, QuarantinedJob
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.strategies.update_status import several_quarantined_token
from tests.consumer.bench import Bench, Gate, Server, for_some, listening_connections
from tests.consumer.conftest import Supply
from tests.contexts import make_context
from tests.programs import wait_until

pytestmark = pytest.mark.usefixtures("frequent_rescues")


def serve_to_the_end(bench: Bench, handler: str, jobs: int, **options: Any) -> int:
    """Run workers until all jobs have ended, a new one whenever one dies, and return how many died."""
    with bench.worker(handler, restart=True, **{"lease": 1} | options) as worker:

        def is_done() -> bool:
            assert len(worker.said("died")) <= 3 * jobs, "the poison job does not fail"
            assert not worker.has_ended, "\n".join(["a worker ended in another way:", *worker.lines[-40:]])
            states = bench.states()
            return not states["pending"] + states["processing"]

        wait_until(is_done)
        worker.signal(15)
        assert worker.await_end() == 0
        return len(worker.said("died"))


@pytest.mark.once
def test_a_poison_job_among_nine_others(bench: Bench) -> None:
    check_poison_among_nine_others(bench)


@pytest.mark.once
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


@pytest.mark.once
def test_a_handler_that_closes_descriptors_ends_its_worker(mixed: Bench) -> None:
    """Nothing could wake its main thread, and a signal would not end it."""
    bench = mixed
    [good, bad] = [*bench.enqueue(1), *bench.enqueue(1, payload="closing")]
    with bench.worker("closing") as worker:
        assert worker.await_end() != 0
    assert bench.row(bad).status != "completed"
    assert bench.effects() <= Counter([good])


@pytest.mark.once
def test_a_job_that_takes_all_memory(mixed: Bench) -> None:
    bench = mixed
    good = bench.enqueue(2)
    [greedy] = bench.enqueue(1, payload="greedy", max_attempts=2)
    good += bench.enqueue(2)
    # No worker dies, and one that allocates memory for a second extends no lease.
    serve_to_the_end(bench, "greedy", 5, retry=None, lease=30)
    bench.expect({"completed": 4, "failed": 1}, effects=good)
    assert bench.row(greedy).last_error.startswith("MemoryError")
    bench.assert_tidy()


@pytest.mark.once
def test_a_poison_job_in_a_batch(mixed: Bench) -> None:
    bench = mixed
    good = bench.enqueue(3)
    [poison] = bench.enqueue(1, payload="poison", max_attempts=2)
    good += bench.enqueue(3)
    serve_to_the_end(bench, "deadly_batch", 7, batch=True)
    bench.expect({"completed": 6, "failed": 1}, attempts=dict.fromkeys(good, 1) | {poison: 2}, effects=good)


@pytest.mark.once
def test_two_poison_jobs_spend_their_own_attempts_only(mixed: Bench) -> None:
    bench = mixed
    poison = bench.enqueue(2, payload="poison", max_attempts=2)
    good = bench.enqueue(2)
    # Two quarantined jobs run at once, and both poison jobs may be among them.
    serve_to_the_end(bench, "deadly", 4, concurrency=4)
    bench.expect({"completed": 2, "failed": 2}, attempts=dict.fromkeys(poison, 2) | dict.fromkeys(good, 1))


@pytest.mark.once
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


@pytest.mark.once
def test_a_job_that_succeeds_after_its_worker_died_counts_both(bench: Bench) -> None:
    """It ran alone, so it counts as responsible for the crash; its second run does not use its session."""
    [key] = bench.enqueue(1)
    with bench.worker("wait", lease=1, batch_size=1) as worker:
        worker.await_word("started")
        worker.signal(9)
        worker.await_end()
    with bench.consumer(batch_size=1).running():
        wait_until(lambda: bench.states() == {"completed": 1})
    bench.expect(attempts={key: 2})


@pytest.mark.once
def test_quarantined_jobs_do_not_block_other_jobs(bench: Bench) -> None:
    """While one of them is slow."""
    quarantined = bench.enqueue(3, payload="quarantined")
    with bench.worker("wait", lease=1, concurrency=3, batch_size=3) as worker:
        worker.await_word("started", times=1)
        if not bench.held:
            worker.await_word("started", times=3)
        worker.signal(9)
        worker.await_end()
    gate = Gate()
    with bench.consumer(for_some({"quarantined": gate}), concurrency=3, batch_size=2).running():
        gate.await_call()
        bench.enqueue(20)
        wait_until(lambda: bench.states()["completed"] == 20)
        gate.open()
        wait_until(lambda: bench.states() == {"completed": 23})
    assert gate.most == 1
    assert {bench.row(key).attempts for key in quarantined} == {1}
    bench.assert_tidy()


def enqueue_quarantined(leased: Bench) -> list[int]:
    """Return the keys of jobs whose rows are as a dead worker leaves them."""
    keys = leased.enqueue(4)
    leased.execute(sa.update(leased.Job).values(lease_token=sa.func.gen_random_uuid()))
    return keys


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
def test_a_lost_connection_does_not_count_as_a_crash(bench: Bench) -> None:
    """No attempt is counted: the job runs again by itself."""
    bench.enqueue(1)
    gate = Gate(first=bench.work)
    with bench.consumer(gate, retry=lambda *_: 0).running():
        gate.await_call()
        bench.database.kill_backends()
        gate.open()
        wait_until(lambda: bench.states() == {"completed": 1})
    bench.expect(attempts=1, effects=1)


# -- quarantined jobs: after a crash several run at once, and no attempt is counted for those that did not cause it --
ONE, TWO, THREE, FOUR = [(number,) for number in range(4)]


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
@pytest.mark.parametrize(("times", "at_once"), [(1, 3), (2, 1)])
def test_quarantined_jobs_occupy_half_of_the_handlers(bench: Bench, times: int, at_once: int) -> None:
    quarantined = bench.enqueue(7, payload="quarantined")
    mark_as_crashed(bench, quarantined, times=times)
    gate = Gate()
    with bench.consumer(for_some({"quarantined": gate}), concurrency=6).running():
        wait_until(lambda: gate.running == at_once, "that as many run at once", seconds=10)
        fresh = bench.enqueue(20)
        wait_until(lambda: bench.states()["completed"] == len(fresh))
        gate.open()
        wait_until(lambda: bench.states() == {"completed": len(fresh) + len(quarantined)})
    assert gate.most == at_once
    bench.expect(attempts=1)


@pytest.mark.once
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
    bench.expect({"completed": 6, "failed": 1}, attempts=dict.fromkeys([*good, poison], 1))
    assert len(worker.said("died")) == 2
    bench.assert_tidy()


# -- the crash journal is written beside the transaction that holds jobs, and must cause no deadlock with it -------


@pytest.fixture
def held(supply: Supply, api: str) -> Bench:
    """The empty queue of a strategy that holds a transaction."""
    return supply.take("batch_select", api)


@pytest.fixture
def held_by_threads(supply: Supply) -> Bench:
    return supply.take("batch_select", "sync")


def test_a_transaction_that_locks_both_tables_is_not_blocked(held: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for the Consumer's jobs, and the Consumer for the journal: the server cannot detect that."""
    monkeypatch.setattr(held_routines, "JOURNAL_DEADLINE", 0.2)
    held.enqueue(3)
    table = held.Job.__table__.name
    waits = """
        SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO sqlaqueue_crash_journal%' AND pid <> pg_backend_pid()
    """
    with held.engine.connect() as admin:
        admin.execute(sa.text("LOCK TABLE sqlaqueue_crash_journal"))
        with held.consumer().running():
            wait_until(lambda: held.execute(waits))
            got_through = threading.Event()

            def lock_the_other() -> None:
                admin.execute(sa.text(f"LOCK TABLE {table}"))
                got_through.set()

            threading.Thread(target=lock_the_other, daemon=True).start()
            assert got_through.wait(30), "it waits for the Consumer, which waits for it"
            admin.rollback()
            wait_until(lambda: held.states() == {"completed": 3})
    held.assert_tidy()


def test_a_run_ends_though_its_journal_is_locked(held_by_threads: Bench) -> None:
    """The entry that it leaves there counts no attempt: the jobs wait as before."""
    held = held_by_threads
    held.enqueue()
    gate = Gate()
    # No pool: the connection of the handler that is given up comes back when the Consumer is gone.
    given_up = held.consumer(gate, grace=0.2, engine={"poolclass": sa.NullPool})
    not_stopped = pytest.raises(HandlerNotStopped, match="still runs after the grace period")
    with not_stopped, given_up.running() as server, held.engine.connect() as admin:
        context = await_start(server)
        gate.await_call()
        admin.execute(sa.text("LOCK TABLE sqlaqueue_crash_journal"))
        server.stop()
        assert server.finished.wait(30), "it waits for the transaction that locks its journal"
        admin.rollback()
        gate.open()
        wait_until(lambda: not context.runner._working, "that the handler has ended")
    assert held.states() == {"pending": 1}


def test_the_thread_that_waits_for_the_workers_may_fail(
    held_by_threads: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run()`` raises its error, and no worker is left running."""

    def fail(seconds: float) -> None:
        raise RuntimeError("out of threads")

    # No pool: workers that are busy in that moment have their connections for a little longer than it lasts.
    watched = held_by_threads.consumer(engine={"poolclass": sa.NullPool})
    with pytest.raises(RuntimeError, match="out of threads"), watched.running() as server:
        context = await_start(server)
        wait_until(lambda: len(listening_connections(held_by_threads)) == 1)
        monkeypatch.setattr(context.runner._waker, "wait", fail)
        context.runner._waker.wake()
        assert server.finished.wait(30)
    wait_until(lambda: not context.runner._working, "that all threads have ended")
    wait_until(lambda: not listening_connections(held_by_threads), "that it listens no longer")


def await_start(server: Server) -> Any:
    wait_until(lambda: server.context is not None and server.context.has_claimed)
    return server.context


def test_a_cancellation_that_the_server_refuses_is_logged(caplog: Any) -> None:
    """The server may be restarting, or have no connection left: the thread that checks deadlines goes on."""

    class Refusing:
        def cancel(self) -> None:
            raise OperationalError("cancel", {}, Exception("too many clients"))

    _cancel(Refusing(), sa.create_engine("postgresql+psycopg://"))
    assert "cannot cancel a statement" in caplog.text


@pytest.mark.parametrize("analyzed", [False, True])
def test_jobs_of_other_batches_are_found_by_a_hash(held_by_threads: Bench, *, analyzed: bool) -> None:
    """Comparing each job of a batch with each job of the others would take longer than the claim."""
    held, spec, plans = held_by_threads, spec_of(held_by_threads.Job), list[str]()

    def write(first: int) -> quarantine.JournalEntry:
        names = tuple(key_text((key,)) for key in range(first, first + 500))
        entry = quarantine.JournalEntry(names, solely_responsible=False)
        quarantine.write_entry(session, spec, entry, "worker")
        session.commit()
        return entry

    @sa.event.listens_for(held.engine, "before_cursor_execute")
    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "INSERT INTO sqlaqueue_crash_journal" in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(line for (line,) in cursor.fetchall()))

    try:
        with Session(held.engine) as session:
            assert write(1).quarantined == frozenset()
            assert write(501).quarantined == frozenset()
            if analyzed:
                session.execute(sa.text("ANALYZE sqlaqueue_crash_journal"))
            assert write(999).quarantined == {"999", "1000"}
            session.execute(sa.text("DELETE FROM sqlaqueue_crash_journal"))
            session.commit()
    finally:
        sa.event.remove(held.engine, "before_cursor_execute", explain)
    assert len(plans) == 3
    assert all("hashed SubPlan" in plan for plan in plans)


# -- handlers that fork: the child never serves the queue, however it leaves the handler ---------------------------
ENDS = {"return": 0, "raise": 1, "exit": 7, "commit": 1, "statement": 1, "suspend": 0}
"""The ways in which a child leaves the handler, and the exit code of each."""


@pytest.mark.once
def test_a_child_that_returns_from_the_handler_is_ended(bench: Bench) -> None:
    children_are_ended(bench, ENDS)


def children_are_ended(bench: Bench, ends: Mapping[str, int]) -> None:
    """Assert that the children end with these codes, and that their parent does its jobs."""
    keys = [bench.enqueue(1, payload=way)[0] for way in ends for _ in range(2)]
    with bench.worker("forking", concurrency=2) as worker:
        wait_until(lambda: worker.has_ended or bench.states() == {"completed": len(keys)})
        assert not worker.has_ended, worker.lines[-20:]
        worker.signal(15)
        assert worker.await_end() == 0
    bench.expect(attempts=1, effects=keys)
    codes = Counter(worker.said("copy ended:"))
    assert codes == {f"{way} {code}": 2 for way, code in ends.items()}
    bench.assert_tidy()


@pytest.mark.once
def test_children_that_exit_in_the_handler_are_left_alone(bench: Bench) -> None:
    """By os._exit(), exec() and multiprocessing; SIGTERM ends them as well."""
    keys = [bench.enqueue(1, payload=way)[0] for way in ("_exit", "exec", "process", "pool", "terminate")]
    with bench.worker("with_children") as worker:
        wait_until(lambda: worker.has_ended or bench.states() == {"completed": len(keys)})
        worker.signal(15)
        assert worker.await_end() == 0
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert sorted(worker.said("child:")) == ["_exit 5", "exec 6", "pool [1, 4, 9]", "process 8", "terminate -15"]


@pytest.mark.once
def test_a_job_that_is_rescued_during_a_search_is_searched_for(sync_leased: Bench) -> None:
    bench = sync_leased
    context = make_context(bench.Job, session_factory=bench.sessions)

    def rescue(*_: Any) -> None:
        context.quarantine.may_wait = True

    with bench.sessions() as session:
        assert context.claimer.claim_quarantined(session) == []
        assert not context.quarantine.may_wait
        context.quarantine.may_wait = True
        sa.event.listen(session.connection(), "after_cursor_execute", rescue)
        # Its query has not seen the job.
        assert context.claimer.claim_quarantined(session) == []
    assert context.quarantine.may_wait
