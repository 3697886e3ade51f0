"""Each recipe of the documentation runs the jobs of an existing system on its own tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete

if TYPE_CHECKING:
    from tests.recipes.conftest import ExistingSystem

    MakeSystem = Callable[..., ExistingSystem]


def once(jobs: range | set[int]) -> Counter[int]:
    return Counter(dict.fromkeys(jobs, 1))


# -- a job table and a message table -------------------------------------------------------------------------------


def test_message_table(make_system: MakeSystem) -> None:
    system = make_system("message-table")
    system.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 30)")
    system.execute("INSERT INTO jobs (status) VALUES ('new'), ('complete')")
    # Some messages name a job that does not exist, is not pending, or has another message.
    system.execute("INSERT INTO message_queue (target_id) VALUES (31), (99)")
    system.execute("INSERT INTO message_queue (target_id) SELECT n FROM generate_series(30, 1, -1) AS n")
    system.execute("INSERT INTO message_queue (target_id) VALUES (5), (98), (32)")
    system.execute("INSERT INTO message_queue (target_id, status) VALUES (97, 'held')")

    def done() -> bool:
        (waiting,) = system.execute("SELECT count(*) FROM jobs WHERE status = 'new_waiting'")
        return waiting == (0,)

    system.kill_one_of_two(done, hold=3)
    assert system.effects() == once(range(1, 31))
    assert system.execute("SELECT status, attempts, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("complete", 0, 1),
        ("complete", 1, 30),
        ("new", 0, 1),
    ]
    system.program().consumer.drain()
    assert system.execute("SELECT target_id, status FROM message_queue") == [(97, "held")]
    assert system.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_message_table_in_order_and_again(make_system: MakeSystem, caplog: pytest.LogCaptureFixture) -> None:
    system = make_system("message-table")
    program = system.program()
    system.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 4)")
    system.execute(
        "INSERT INTO message_queue (target_id, created) VALUES (99, now() - interval '1 h'), (1, now()),"
        " (2, now() - interval '2 h'), (4, now() - interval '3 h'), (98, now() - interval '5 h')"
    )
    run: list[int] = []

    def process(session: Session, job: object) -> None:
        run.append(job.id)
        if job.id == 2:
            raise ValueError("bad")

    program.consumer._handler = process
    # Messages without a pending job come first and in between. They do not end the drain, and the log names them.
    assert program.consumer.drain() == 3
    assert run == [4, 2, 1]
    assert {key in caplog.text for key in ("98", "99")} == {True}
    assert system.execute("SELECT count(*) FROM message_queue") == [(0,)]
    assert system.execute("SELECT id, status, attempts FROM jobs ORDER BY id") == [
        (1, "complete", 1),
        (2, "failed", 1),
        (3, "new_waiting", 0),
        (4, "complete", 1),
    ]
    # Requeued by hand up to the fourth attempt, and once more.
    for attempts in range(2, 6):
        system.execute("UPDATE jobs SET status = 'new_waiting' WHERE id = 2")
        system.execute("INSERT INTO message_queue (target_id) VALUES (2)")
        assert program.consumer.drain() == 1
        assert system.execute("SELECT status, attempts FROM jobs WHERE id = 2") == [("failed", attempts)]


def test_message_table_with_a_job_that_kills_its_worker(make_system: MakeSystem) -> None:
    system = make_system("message-table")
    system.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 9)")
    system.execute("INSERT INTO message_queue (target_id) SELECT n FROM generate_series(1, 9) AS n")
    left = "SELECT id, status, attempts FROM jobs WHERE status <> 'complete' OR attempts <> 1"
    # The whole batch may be claimed, and die, once before the responsible job is known.
    assert system.kill_by_job(3, lambda: system.execute(left) == [(3, "failed", 4)]) in {4, 5}
    assert system.effects() == once(set(range(1, 10)) - {3})


# -- a table whose rows are the messages -----------------------------------------------------------------------------


def test_rows_as_messages(make_system: MakeSystem) -> None:
    system = make_system("rows-as-messages")
    system.execute("INSERT INTO queue (itemid) SELECT x FROM generate_series(1, 20) AS x")
    held = system.kill_one_of_two(lambda: system.execute("SELECT count(*) FROM queue") == [(0,)], hold=3)
    # Items are claimed in order: the worker was killed in its third one.
    assert held == 3
    assert system.effects() == once(set(range(1, 21)) - {13})
    assert system.execute("SELECT key, state FROM sqlaqueue_dead_letter") == [([13], "failed")]
    assert system.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_rows_as_messages_with_one_that_kills_its_worker(make_system: MakeSystem) -> None:
    system = make_system("rows-as-messages")
    system.execute("INSERT INTO queue (itemid) SELECT x FROM generate_series(1, 9) AS x")
    assert system.kill_by_job(3, lambda: system.execute("SELECT count(*) FROM queue") == [(0,)]) == 5
    assert system.effects() == once(set(range(1, 10)) - {3})
    assert system.execute("SELECT key, state FROM sqlaqueue_dead_letter") == [([3], "failed")]


def test_rows_as_messages_are_back_after_a_rollback(make_system: MakeSystem) -> None:
    system = make_system("rows-as-messages")
    program = system.program()
    system.execute("INSERT INTO queue (itemid, is_done) SELECT x, x = 2 FROM generate_series(1, 20) AS x")
    with Session(program.engine) as one, Session(program.engine) as other:
        assert [item.itemid for item in one.scalars(claim(program.Item, 2))] == [1, 2]
        (third,) = other.scalars(claim(program.Item, 1))
        assert third.itemid == 3
        one.rollback()
        other.execute(complete(third))
        other.commit()
    rows = system.execute("SELECT itemid, is_done FROM queue ORDER BY itemid")
    assert rows == [(x, x == 2) for x in range(1, 21) if x != 3]


# -- a table with only a status column -----------------------------------------------------------------------------


def fill_status_column(system: ExistingSystem) -> None:
    system.execute(system.recipe.existing[1])


def test_status_column(make_system: MakeSystem) -> None:
    system = make_system("status-column")
    fill_status_column(system)
    theirs, mine = set(range(3, 21, 3)), {n for n in range(1, 21) if n % 3}
    # Without a lease the dead worker's job is not rescued.
    held = system.kill_one_of_two(lambda: len(system.effects()) == len(mine) - 1, hold=2)
    assert system.effects() == once(mine - {held})
    processing = "SELECT id FROM jobs WHERE status = 'processing' ORDER BY id"
    assert {n for (n,) in system.execute(processing)} == theirs | {held}
    system.execute(f"UPDATE jobs SET status = 'pending' WHERE id = {held}")
    assert system.program().consumer.drain() == 1
    assert system.execute("SELECT id, status FROM jobs ORDER BY id") == [
        (n, "processing" if n in theirs else "completed") for n in range(1, 21)
    ]


def test_status_column_two_open_transactions_take_different_rows(make_system: MakeSystem) -> None:
    system = make_system("status-column")
    fill_status_column(system)
    program = system.program()
    with Session(program.engine) as one, Session(program.engine) as other:
        other.execute(sa.text("SET lock_timeout = '1ms'"))
        (first,) = one.scalars(claim(program.Job, 1))
        (second,) = other.scalars(claim(program.Job, 1))
        assert (first.id, first.status, second.id, second.status) == (1, "processing", 2, "processing")
        one.commit()
        other.commit()
        assert one.scalars(complete(first)).all() == [1]
        one.commit()


# -- a worker script -------------------------------------------------------------------------------------------------


def test_worker_script(make_system: MakeSystem) -> None:
    system = make_system("worker-script", time_zone="America/New_York")
    system.execute(
        "INSERT INTO jobs (job_data, job_status) SELECT 'hello world ' || n, 'pending' FROM generate_series(0, 19) AS n"
    )
    system.execute("INSERT INTO jobs (job_data, job_status, attempts, run_at) VALUES ('nulls', 'pending', NULL, NULL)")
    system.execute("INSERT INTO jobs (job_data, job_status) VALUES ('not a job', NULL), ('done', 'success')")
    done = "SELECT count(*) FROM jobs WHERE job_status = 'pending'"
    system.kill_one_of_two(lambda: system.execute(done) == [(0,)], hold=3)
    assert system.effects() == once(range(1, 22))
    assert system.execute("SELECT job_status, attempts, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("success", 0, 1),
        ("success", 1, 21),
        (None, 0, 1),
    ]
    assert system.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_worker_script_attempts_and_delays_in_new_york(make_system: MakeSystem) -> None:
    system = make_system("worker-script", time_zone="America/New_York")
    program = system.program()
    system.execute("INSERT INTO jobs (job_data, job_status) VALUES ('bad', 'pending'), ('good', 'pending')")
    assert system.execute("SHOW timezone") == [("America/New_York",)]
    wait = "SELECT extract(epoch FROM run_at - updated_at)::float8 FROM jobs WHERE job_id = 1"
    for attempt in (1, 2):
        assert program.consumer.drain() == 3 - attempt
        assert system.execute("SELECT job_status, attempts FROM jobs WHERE job_id = 1") == [("pending", attempt)]
        # updated_at is the start of the transaction that has run the batch, on the same clock.
        ((seconds,),) = system.execute(wait)
        assert 5 <= seconds < 60
        assert program.consumer.drain() == 0
        system.execute("UPDATE jobs SET run_at = run_at - interval '60 s'")
    assert program.consumer.drain() == 1
    ended = "SELECT job_status, attempts, last_error, updated_at > created_at FROM jobs WHERE job_id = 1"
    assert system.execute(ended) == [("failed", 3, "ValueError: bad data", True)]
    # Again by plain SQL, from a session of the same zone: one more run each time.
    for attempts in (4, 5):
        system.execute("UPDATE jobs SET job_status = 'pending' WHERE job_status = 'failed'")
        assert program.consumer.drain() == 1
        assert system.execute(ended) == [("failed", attempts, "ValueError: bad data", True)]


def test_worker_script_takes_five_under_one_lock(make_system: MakeSystem) -> None:
    system = make_system("worker-script", time_zone="America/New_York")
    program = system.program()
    system.execute("INSERT INTO jobs (job_data, job_status) SELECT 'x', 'pending' FROM generate_series(1, 7)")
    sizes: list[int] = []
    free = "SELECT count(*) FROM (SELECT FROM jobs WHERE job_status = 'pending' FOR UPDATE SKIP LOCKED) AS free"

    def task(session: Session, job: object) -> None:
        sizes.append(system.execute(free)[0][0])

    program.consumer._handler = task
    assert program.consumer.drain() == 7
    assert sizes == [2] * 5 + [0] * 2


# -- run a function later ---------------------------------------------------------------------------------------------


def test_run_later(make_system: MakeSystem) -> None:
    system = make_system("run-later")
    program = system.program()
    arguments = {"to": "ada@example.com", "pages": 3}
    with Session(program.engine) as session:
        for _ in range(20):
            program.later(session, program.send_report, **arguments)
        session.commit()

    def pass_time(dead: int) -> None:
        """Let the leases of the dead worker expire."""
        held = f"status = 'processing' AND claimed_by ~ ':{dead}( |$)'"
        assert system.execute(f"UPDATE call SET lease_expires_at = now() WHERE {held} RETURNING id")

    done = "SELECT count(*) FROM call WHERE status <> 'completed'"
    system.kill_one_of_two(lambda: system.execute(done) == [(0,)], hold=1, then=pass_time)
    assert system.effects() == once(range(1, 21))


def test_run_later_at_its_time_with_its_transaction(make_system: MakeSystem) -> None:
    system = make_system("run-later")
    program = system.program()
    called: list[tuple[str, int]] = []

    def remember(session: Session, to: str, pages: int) -> None:
        called.append((to, pages))

    program.task(remember)
    with Session(program.engine) as session:
        program.later(session, remember, to="never", pages=0)
        session.rollback()
        program.later(session, remember, to="now", pages=1)
        program.later(session, remember, after=program.timedelta(hours=1), to="later", pages=2)
        session.add(program.Call(function="gone", arguments={}))
        session.commit()
    assert program.consumer.drain() == 2
    assert called == [("now", 1)]
    system.execute("UPDATE call SET run_at = run_at - interval '1 h'")
    assert program.consumer.drain() == 1
    assert called == [("now", 1), ("later", 2)]
    assert system.execute("SELECT last_error FROM call WHERE status = 'failed'") == [
        ("no_function: there is no function gone",)
    ]
