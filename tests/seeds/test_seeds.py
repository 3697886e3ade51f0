"""Systems that were there before the library: each runs on its own tables, by the recipe of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete

if TYPE_CHECKING:
    from tests.seeds.conftest import Seed

    Plant = Callable[..., Seed]


def once(jobs: range | set[int]) -> Counter[int]:
    return Counter(dict.fromkeys(jobs, 1))


# -- a job table and a message table -------------------------------------------------------------------------------


def test_message_table(plant: Plant) -> None:
    seed = plant("message-table")
    seed.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 30)")
    seed.execute("INSERT INTO jobs (status) VALUES ('new'), ('complete')")
    # Some are about no job, about one that is not waiting, or about one that another message is about as well.
    seed.execute("INSERT INTO message_queue (target_id) VALUES (31), (99)")
    seed.execute("INSERT INTO message_queue (target_id) SELECT n FROM generate_series(30, 1, -1) AS n")
    seed.execute("INSERT INTO message_queue (target_id) VALUES (5), (98), (32)")
    seed.execute("INSERT INTO message_queue (target_id, status) VALUES (97, 'held')")

    def done() -> bool:
        (waiting,) = seed.execute("SELECT count(*) FROM jobs WHERE status = 'new_waiting'")
        return waiting == (0,)

    seed.kill_one_of_two(done, hold=3)
    assert seed.effects() == once(range(1, 31))
    assert seed.execute("SELECT status, attempts, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("complete", 0, 1),
        ("complete", 1, 30),
        ("new", 0, 1),
    ]
    seed.program().consumer.drain()
    assert seed.execute("SELECT target_id, status FROM message_queue") == [(97, "held")]
    assert seed.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_message_table_in_order_and_again(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    seed = plant("message-table")
    program = seed.program()
    seed.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 4)")
    seed.execute(
        "INSERT INTO message_queue (target_id, created) VALUES (99, now() - interval '1 h'), (1, now()),"
        " (2, now() - interval '2 h'), (4, now() - interval '3 h'), (98, now() - interval '5 h')"
    )
    run: list[int] = []

    def process(session: Session, job: object) -> None:
        run.append(job.id)
        if job.id == 2:
            raise ValueError("bad")

    program.consumer._handler = process
    # The messages that are in vain come first, and in between; they end nothing, and are told of.
    assert program.consumer.drain() == 3
    assert run == [4, 2, 1]
    assert {key in caplog.text for key in ("98", "99")} == {True}
    assert seed.execute("SELECT count(*) FROM message_queue") == [(0,)]
    assert seed.execute("SELECT id, status, attempts FROM jobs ORDER BY id") == [
        (1, "complete", 1),
        (2, "failed", 1),
        (3, "new_waiting", 0),
        (4, "complete", 1),
    ]
    # Up to the fourth attempt and one more, by hand each time.
    for attempts in range(2, 6):
        seed.execute("UPDATE jobs SET status = 'new_waiting' WHERE id = 2")
        seed.execute("INSERT INTO message_queue (target_id) VALUES (2)")
        assert program.consumer.drain() == 1
        assert seed.execute("SELECT status, attempts FROM jobs WHERE id = 2") == [("failed", attempts)]


def test_message_table_with_a_job_that_kills_its_worker(plant: Plant) -> None:
    seed = plant("message-table")
    seed.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 9)")
    seed.execute("INSERT INTO message_queue (target_id) SELECT n FROM generate_series(1, 9) AS n")
    left = "SELECT id, status, attempts FROM jobs WHERE status <> 'complete' OR attempts <> 1"
    # The whole batch may be claimed, and die, once before the blame is known.
    assert seed.kill_by_job(3, lambda: seed.execute(left) == [(3, "failed", 4)]) in {4, 5}
    assert seed.effects() == once(set(range(1, 10)) - {3})


# -- a table whose rows are the messages -----------------------------------------------------------------------------


def test_rows_as_messages(plant: Plant) -> None:
    seed = plant("rows-as-messages")
    seed.execute("INSERT INTO queue (itemid) SELECT x FROM generate_series(1, 20) AS x")
    held = seed.kill_one_of_two(lambda: seed.execute("SELECT count(*) FROM queue") == [(0,)], hold=3)
    # In the order of the items: it was at its third one.
    assert held == 3
    assert seed.effects() == once(set(range(1, 21)) - {13})
    assert seed.execute("SELECT key, state FROM sqlaqueue_dead_letter") == [([13], "failed")]
    assert seed.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_rows_as_messages_with_one_that_kills_its_worker(plant: Plant) -> None:
    seed = plant("rows-as-messages")
    seed.execute("INSERT INTO queue (itemid) SELECT x FROM generate_series(1, 9) AS x")
    assert seed.kill_by_job(3, lambda: seed.execute("SELECT count(*) FROM queue") == [(0,)]) == 5
    assert seed.effects() == once(set(range(1, 10)) - {3})
    assert seed.execute("SELECT key, state FROM sqlaqueue_dead_letter") == [([3], "failed")]


def test_rows_as_messages_are_back_after_a_rollback(plant: Plant) -> None:
    seed = plant("rows-as-messages")
    program = seed.program()
    seed.execute("INSERT INTO queue (itemid, is_done) SELECT x, x = 2 FROM generate_series(1, 20) AS x")
    with Session(program.engine) as one, Session(program.engine) as other:
        assert [item.itemid for item in one.scalars(claim(program.Item, 2))] == [1, 2]
        (third,) = other.scalars(claim(program.Item, 1))
        assert third.itemid == 3
        one.rollback()
        other.execute(complete(third))
        other.commit()
    rows = seed.execute("SELECT itemid, is_done FROM queue ORDER BY itemid")
    assert rows == [(x, x == 2) for x in range(1, 21) if x != 3]


# -- a table with a status and nothing else --------------------------------------------------------------------------


def fill_status_column(seed: Seed) -> None:
    seed.execute(seed.recipe.existing[1])


def test_status_column(plant: Plant) -> None:
    seed = plant("status-column")
    fill_status_column(seed)
    theirs, mine = set(range(3, 21, 3)), {n for n in range(1, 21) if n % 3}
    # The dead worker's job is nobody's: it stays as it was left.
    held = seed.kill_one_of_two(lambda: len(seed.effects()) == len(mine) - 1, hold=2)
    assert seed.effects() == once(mine - {held})
    processing = "SELECT id FROM jobs WHERE status = 'processing' ORDER BY id"
    assert {n for (n,) in seed.execute(processing)} == theirs | {held}
    seed.execute(f"UPDATE jobs SET status = 'pending' WHERE id = {held}")
    assert seed.program().consumer.drain() == 1
    assert seed.execute("SELECT id, status FROM jobs ORDER BY id") == [
        (n, "processing" if n in theirs else "completed") for n in range(1, 21)
    ]


def test_status_column_two_open_transactions_take_different_rows(plant: Plant) -> None:
    seed = plant("status-column")
    fill_status_column(seed)
    program = seed.program()
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


def test_worker_script(plant: Plant) -> None:
    seed = plant("worker-script", time_zone="America/New_York")
    seed.execute(
        "INSERT INTO jobs (job_data, job_status) SELECT 'hello world ' || n, 'pending' FROM generate_series(0, 19) AS n"
    )
    seed.execute("INSERT INTO jobs (job_data, job_status, attempts, run_at) VALUES ('nulls', 'pending', NULL, NULL)")
    seed.execute("INSERT INTO jobs (job_data, job_status) VALUES ('not a job', NULL), ('done', 'success')")
    done = "SELECT count(*) FROM jobs WHERE job_status = 'pending'"
    seed.kill_one_of_two(lambda: seed.execute(done) == [(0,)], hold=3)
    assert seed.effects() == once(range(1, 22))
    assert seed.execute("SELECT job_status, attempts, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("success", 0, 1),
        ("success", 1, 21),
        (None, 0, 1),
    ]
    assert seed.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_worker_script_attempts_and_delays_in_new_york(plant: Plant) -> None:
    seed = plant("worker-script", time_zone="America/New_York")
    program = seed.program()
    seed.execute("INSERT INTO jobs (job_data, job_status) VALUES ('bad', 'pending'), ('good', 'pending')")
    assert seed.execute("SHOW timezone") == [("America/New_York",)]
    wait = "SELECT extract(epoch FROM run_at - updated_at)::float8 FROM jobs WHERE job_id = 1"
    for attempt in (1, 2):
        assert program.consumer.drain() == 3 - attempt
        assert seed.execute("SELECT job_status, attempts FROM jobs WHERE job_id = 1") == [("pending", attempt)]
        # updated_at is the start of the transaction that has run the batch, on the same clock.
        ((seconds,),) = seed.execute(wait)
        assert 5 <= seconds < 60
        assert program.consumer.drain() == 0
        seed.execute("UPDATE jobs SET run_at = run_at - interval '60 s'")
    assert program.consumer.drain() == 1
    ended = "SELECT job_status, attempts, last_error, updated_at > created_at FROM jobs WHERE job_id = 1"
    assert seed.execute(ended) == [("failed", 3, "ValueError: bad data", True)]
    # Again by plain SQL, from a session of the same zone: one more run each time.
    for attempts in (4, 5):
        seed.execute("UPDATE jobs SET job_status = 'pending' WHERE job_status = 'failed'")
        assert program.consumer.drain() == 1
        assert seed.execute(ended) == [("failed", attempts, "ValueError: bad data", True)]


def test_worker_script_takes_five_under_one_lock(plant: Plant) -> None:
    seed = plant("worker-script", time_zone="America/New_York")
    program = seed.program()
    seed.execute("INSERT INTO jobs (job_data, job_status) SELECT 'x', 'pending' FROM generate_series(1, 7)")
    sizes: list[int] = []
    free = "SELECT count(*) FROM (SELECT FROM jobs WHERE job_status = 'pending' FOR UPDATE SKIP LOCKED) AS free"

    def task(session: Session, job: object) -> None:
        sizes.append(seed.execute(free)[0][0])

    program.consumer._handler = task
    assert program.consumer.drain() == 7
    assert sizes == [2] * 5 + [0] * 2


# -- run code later ----------------------------------------------------------------------------------------------------


def test_run_later(plant: Plant) -> None:
    seed = plant("run-later")
    program = seed.program()
    arguments = {"to": "ada@example.com", "pages": 3}
    with Session(program.engine) as session:
        for _ in range(20):
            program.later(session, program.send_report, **arguments)
        session.commit()

    def pass_time(dead: int) -> None:
        """As if the leases of the dead worker were over."""
        held = f"status = 'processing' AND claimed_by ~ ':{dead}( |$)'"
        assert seed.execute(f"UPDATE call SET lease_expires_at = now() WHERE {held} RETURNING id")

    done = "SELECT count(*) FROM call WHERE status <> 'completed'"
    seed.kill_one_of_two(lambda: seed.execute(done) == [(0,)], hold=1, then=pass_time)
    assert seed.effects() == once(range(1, 21))


def test_run_later_at_its_time_with_its_transaction(plant: Plant) -> None:
    seed = plant("run-later")
    program = seed.program()
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
    seed.execute("UPDATE call SET run_at = run_at - interval '1 h'")
    assert program.consumer.drain() == 1
    assert called == [("now", 1), ("later", 2)]
    assert seed.execute("SELECT last_error FROM call WHERE status = 'failed'") == [
        ("no_function: there is no function gone",)
    ]
