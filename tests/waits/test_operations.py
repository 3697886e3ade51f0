"""Single operations on jobs that wait for others: statements, deletes, shapes of keys and tables, trees, repairs."""

import enum
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column, relationship

from sqlaqueue import cancel, claim, complete, fail, reconcile, requeue
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.triggers import channel_of, lock_numbers
from sqlaqueue.queue.options import States
from tests.models import new_base
from tests.waits.driver import APPLY
from tests.waits.models import (
    LEVELS,
    STRATEGIES,
    THREE_MEMBERS,
    TWO,
    create,
    execute,
    faults,
    job_class,
    make_batch,
    make_dependent,
    make_tree,
    set_status,
)

pytestmark = pytest.mark.once


def _batches(engine: sa.Engine) -> list[Any]:
    return execute(engine, "SELECT status, waits_for_count FROM batch ORDER BY id") or []


STATEMENTS: dict[str, tuple[list[str], list[int]]] = {
    "select": (["INSERT INTO member (id, batch_id) SELECT n, 1 FROM generate_series(10, 19) AS n"], [12, 1]),
    "nothing": (["INSERT INTO member (id, batch_id) VALUES (1, 1), (10, 2) ON CONFLICT DO NOTHING"], [2, 2]),
    "upsert": (
        ["""INSERT INTO member (id, batch_id) VALUES (1, 1), (10, 2) ON CONFLICT (id) DO UPDATE SET batch_id = 2"""],
        [1, 3],
    ),
    "merge": (
        [
            """MERGE INTO member USING (VALUES (1), (2), (10)) AS v (n) ON id = n
            WHEN MATCHED AND n = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET status = 'failed'
            WHEN NOT MATCHED THEN INSERT (id, batch_id) VALUES (n, 2)"""
        ],
        [0, 2],
    ),
    "savepoints": (
        [
            "SAVEPOINT a",
            "UPDATE member SET status = 'completed'",
            "ROLLBACK TO a",
            "INSERT INTO member (id, batch_id) VALUES (10, 1)",
            "SAVEPOINT b",
            "INSERT INTO member (id, batch_id) VALUES (11, 2)",
            "RELEASE b",
        ],
        [3, 2],
    ),
    "applied and rolled back": (
        [
            "UPDATE member SET status = 'completed' WHERE id < 3",
            "SAVEPOINT a",
            APPLY,
            "ROLLBACK TO a",
            "UPDATE member SET status = 'pending' WHERE id = 2",
        ],
        [1, 1],
    ),
    "applied early": ([APPLY, "INSERT INTO batch (id) VALUES (0)", "DELETE FROM member"], [0, 0, 0]),
    "filled at once": (
        [APPLY, "INSERT INTO batch (id) VALUES (0)", "INSERT INTO member (id, batch_id) VALUES (10, 0)"],
        [1, 2, 1],
    ),
    "new key": (["INSERT INTO batch (id) VALUES (3)", "UPDATE batch SET id = 5 WHERE id = 3"], [2, 1, 0]),
    "there and back": (["UPDATE member SET status = 'failed'", "UPDATE member SET status = 'pending'"], [2, 1]),
    "nulls": (["UPDATE member SET batch_id = NULL"], [0, 0]),
    "processing": (["UPDATE member SET status = 'processing'"], [2, 1]),
    "no status": (
        ["ALTER TABLE member ALTER status DROP NOT NULL", "UPDATE member SET status = NULL WHERE id <> 1"],
        [2, 1],
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", STATEMENTS)
def test_statements(engine: sa.Engine, name: str) -> None:
    """Whatever a statement does, the counts are those of the states."""
    statements, counts = STATEMENTS[name]
    batch = create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    execute(engine, *statements)
    with engine.connect() as connection:
        assert not faults(connection, batch)
    assert [count for _, count in _batches(engine)] == counts


def test_copy(engine: sa.Engine) -> None:
    batch = create(engine, *make_batch(), rows=TWO)
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection  # of psycopg
        with raw.cursor().copy("COPY member (id, batch_id) FROM STDIN") as copy:
            for number in range(25_000):
                copy.write_row((number, 1 + number % 2))
        raw.commit()
    assert _batches(engine) == [("waiting", 12_500), ("waiting", 12_500)]
    execute(engine, "UPDATE member SET status = 'completed' WHERE batch_id = 1")
    assert _batches(engine) == [("pending", 0), ("waiting", 12_500)]
    with engine.connect() as connection:
        assert not faults(connection, batch)


def test_an_empty_batch_is_due_and_an_open_one_waits_until_it_is_closed(engine: sa.Engine) -> None:
    create(engine, *make_batch(), rows="INSERT INTO batch (id, is_open) VALUES (1, false), (2, true), (3, true)")
    execute(engine, "INSERT INTO member (id, batch_id) VALUES (1, 3)", "UPDATE member SET status = 'completed'")
    assert _batches(engine) == [("pending", 0), ("waiting", 0), ("waiting", 0)]
    execute(engine, "UPDATE batch SET is_open = false")
    assert _batches(engine) == [("pending", 0)] * 3


@pytest.mark.parametrize("held", [False, True])
def test_a_batch_that_is_opened_again_waits_for_what_it_did_not_count(engine: sa.Engine, *, held: bool) -> None:
    """Where a transaction holds the job that it runs, the counts of pending jobs are not kept."""
    strategy = "batch_select" if held else "update_status"
    batch, member = make_batch(config={"strategy": strategy}, members={"strategy": strategy})
    create(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}; {set_status('member', 'completed', 1, 2, 3)}")
    assert _batches(engine) == [("pending", 0)] * 2
    execute(engine, set_status("member", "pending", 1))
    assert _batches(engine) == [("pending", 0) if held else ("waiting", 1), ("pending", 0)]
    execute(engine, "UPDATE batch SET is_open = true")
    assert _batches(engine) == [("waiting", 1), ("waiting", 0)]
    execute(engine, "UPDATE batch SET is_open = false")
    assert _batches(engine) == [("waiting", 1), ("pending", 0)]
    with engine.connect() as connection:
        assert not faults(connection, batch)


def test_a_job_that_has_waited_is_due_from_then_on(engine: sa.Engine) -> None:
    """It is not late; but a time to come stays."""
    past, future = "now() - interval '1 day'", "now() + interval '1 day'"
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE batch SET run_at = CASE id WHEN 1 THEN {past} ELSE {future} END"
    create(engine, *make_batch(), rows=rows)
    [(before,)] = execute(engine, "SELECT clock_timestamp()") or []
    execute(engine, "UPDATE member SET status = 'completed'")
    [(first, _), (second, other)] = execute(engine, f"SELECT run_at, {future} FROM batch ORDER BY id") or []
    assert first > before
    assert abs((other - second).total_seconds()) < 60


def test_a_job_that_is_counted_anew_is_not_due_in_between(engine: sa.Engine) -> None:
    """Its count was not kept while it ran, and what the transaction changes would make it none."""
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE batch SET waits_for_count = 1, status = 'failed', run_at = '2026-01-01'"
    create(engine, *make_batch(), rows=rows)
    execute(engine, set_status("batch", "pending", 1), set_status("member", "completed", 1))
    assert _batches(engine) == [("waiting", 1), ("failed", 1)]
    assert execute(engine, "SELECT run_at = '2026-01-01' FROM batch WHERE id = 1") == [(True,)]


def test_a_job_that_is_back_is_due_from_then_on(engine: sa.Engine) -> None:
    """Even if what it was cancelled for is requeued and completed in one transaction, so that it need not wait."""
    _, child = make_dependent(on_failure="cancel")
    rows = """INSERT INTO parent (id) VALUES (1); INSERT INTO child (id, a_id) VALUES (1, 1);
        UPDATE parent SET status = 'failed'; UPDATE child SET run_at = now() - interval '1 day'"""
    create(engine, child, rows=rows)
    [(before,)] = execute(engine, "SELECT clock_timestamp() FROM child WHERE status = 'cancelled'")
    execute(engine, set_status("parent", "pending", 1), set_status("parent", "completed", 1))
    [(status, run_at, *rest)] = execute(engine, "SELECT status, run_at, finished_at, last_error FROM child")
    assert (status, rest) == ("pending", [None, None])
    assert run_at > before


def test_a_batch_with_another_key_is_counted_once(engine: sa.Engine) -> None:
    """Its members follow it, which looks as if they were added."""
    batch, member = make_batch(onupdate="CASCADE")
    create(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}")
    execute(engine, "UPDATE batch SET id = id + 10")
    assert _batches(engine) == [("waiting", 2), ("waiting", 1)]


def test_a_batch_is_cancelled_once(engine: sa.Engine) -> None:
    """Members that come back are not cancelled by a later change of the row."""
    create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    execute(engine, set_status("batch", "cancelled", 1))
    assert execute(engine, "SELECT status FROM member ORDER BY id") == [("cancelled",), ("cancelled",), ("pending",)]
    execute(engine, set_status("member", "pending", 1), "UPDATE batch SET is_open = true")
    assert execute(engine, "SELECT status FROM member ORDER BY id") == [("pending",), ("cancelled",), ("pending",)]


@pytest.mark.parametrize("add", ["INSERT INTO member (id, batch_id) VALUES (9, 1)", set_status("member", "pending", 3)])
@pytest.mark.parametrize("state", ["processing", "completed", "failed", "cancelled"])
def test_a_batch_that_has_begun_takes_no_member(engine: sa.Engine, state: str, add: str) -> None:
    """At the statement, or at the commit if the batch begins in between; a member that comes back is no new one."""
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE member SET status = 'completed', batch_id = 1"
    create(engine, *make_batch(), rows=rows)
    is_new = add.startswith("INSERT")
    with engine.connect() as first:
        first.execute(sa.text(add))
        execute(engine, f"UPDATE batch SET status = '{state}' WHERE id = 1")
        if is_new:
            with pytest.raises(sa.exc.IntegrityError, match="Batch 1 has started or ended: it takes no further Member"):
                first.exec_driver_sql(APPLY)
        else:
            first.commit()
    with engine.connect() as connection:
        if is_new:
            with pytest.raises(sa.exc.IntegrityError, match="Batch 1 has started or ended: it takes no further Member"):
                connection.exec_driver_sql(add)
            connection.rollback()
        assert connection.scalar(sa.text("SELECT count(*) FROM member")) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO member (id, batch_id, status) VALUES (9, 1, 'completed')",
        "UPDATE member SET status = 'completed', batch_id = 1 WHERE id IN (1, 3)",
        "UPDATE batch SET id = 10 WHERE id = 1",
        """INSERT INTO batch (id) VALUES (3); INSERT INTO member (id, batch_id) VALUES (9, 3);
        UPDATE batch SET status = 'cancelled' WHERE id = 3""",
    ],
    ids=["a member that has ended", "another one for one that ends", "another key", "all in one transaction"],
)
def test_what_is_no_new_member_of_a_batch_that_has_begun(engine: sa.Engine, statement: str) -> None:
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE batch SET status = 'processing'"
    create(engine, *make_batch(onupdate="CASCADE"), rows=rows)
    execute(engine, statement)


@pytest.mark.parametrize(
    "statements",
    [[set_status("member", "pending", 1)], [set_status("batch", "pending", 1), set_status("batch", "processing", 1)]],
    ids=["its failed one is requeued", "it is given back and begun"],
)
def test_a_new_member_of_a_batch_that_has_begun_is_refused_whatever_else(
    engine: sa.Engine, statements: list[str]
) -> None:
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE batch SET status = 'processing'; {set_status('member', 'failed', 1)}"
    create(engine, *make_batch(on_failure="cancel"), rows=rows)
    with pytest.raises(sa.exc.IntegrityError, match="Batch 1 has started or ended: it takes no further Member"):
        execute(engine, *statements, "UPDATE member SET batch_id = 1 WHERE id = 3")


@pytest.mark.parametrize("ondelete", [None, "CASCADE", "SET NULL"])
@pytest.mark.parametrize("on_failure", ["block", "continue", "cancel"])
def test_deletes(engine: sa.Engine, on_failure: str, ondelete: str | None) -> None:
    batch, member = make_batch(on_failure=on_failure, ondelete=ondelete)
    create(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}")
    execute(engine, "DELETE FROM member WHERE id < 3")
    assert _batches(engine) == [("pending", 0), ("waiting", 1)]
    if ondelete is not None:
        execute(engine, "DELETE FROM batch WHERE id = 2")
        assert execute(engine, "SELECT batch_id FROM member") == ([] if ondelete == "CASCADE" else [(None,)])
    parent, child = make_dependent(on_failure=on_failure, ondelete=ondelete)
    rows = """INSERT INTO parent (id, status) VALUES (1, 'pending'), (2, 'pending'), (3, 'completed');
        INSERT INTO child (id, a_id, b_id) VALUES (1, 1, NULL), (2, 1, 2), (3, 3, 2), (4, 3, NULL)"""
    create(engine, parent, rows=rows)
    delete = "DELETE FROM parent WHERE id IN (1, 3)"
    if ondelete is None:
        with pytest.raises(sa.exc.IntegrityError, match="foreign key"):
            execute(engine, delete)
        return
    execute(engine, delete)
    lost = ["pending", "waiting"] if on_failure == "continue" else ["cancelled", "cancelled"]
    expected = [] if ondelete == "CASCADE" else [*lost, "waiting", "pending"]
    assert execute(engine, "SELECT status FROM child ORDER BY id") == [(each,) for each in expected]
    with engine.connect() as connection:
        assert not faults(connection, child, batch)


@pytest.mark.parametrize("mode", ["DEFERRED", "IMMEDIATE"])
def test_a_job_whose_reference_is_taken_away_is_cancelled(engine: sa.Engine, mode: str) -> None:
    _, child = make_dependent(on_failure="block")
    rows = """INSERT INTO parent (id, status) VALUES (1, 'failed'), (2, 'completed');
        INSERT INTO child (id, a_id) VALUES (1, 1), (2, 2), (3, 1)"""
    create(engine, child, rows=rows)
    # The last one left by the third had completed.
    execute(
        engine,
        f"SET CONSTRAINTS ALL {mode}",
        "UPDATE child SET a_id = 2 WHERE id = 3",
        "UPDATE child SET a_id = NULL",
    )
    assert execute(engine, "SELECT status FROM child ORDER BY id") == [("cancelled",), ("pending",), ("pending",)]


@pytest.mark.parametrize(
    ("statements", "status"),
    [
        (["UPDATE child SET a_id = NULL", "UPDATE child SET a_id = 1"], "waiting"),
        (["UPDATE child SET a_id = NULL", set_status("parent", "completed", 1)], "pending"),
        ([set_status("parent", "completed", 1), "DELETE FROM parent"], "pending"),
        ([set_status("parent", "failed", 1), "DELETE FROM parent"], "cancelled"),
    ],
    ids=["given back", "completed after all", "completed before its deletion", "failed before its deletion"],
)
def test_what_is_lost_is_known_at_the_commit(engine: sa.Engine, statements: list[str], status: str) -> None:
    _, child = make_dependent(on_failure="block", ondelete="SET NULL")
    create(engine, child, rows="INSERT INTO parent (id) VALUES (1); INSERT INTO child (id, a_id) VALUES (1, 1)")
    execute(engine, *statements)
    assert execute(engine, "SELECT status FROM child") == [(status,)]


def test_a_cancelled_job_that_is_looked_at_is_cancelled_once(engine: sa.Engine) -> None:
    _, child = make_dependent(on_failure="cancel")
    rows = """INSERT INTO parent (id) VALUES (1), (2); INSERT INTO child (id, a_id) VALUES (1, 1);
        UPDATE parent SET status = 'failed' WHERE id = 1"""
    create(engine, child, rows=rows)
    what = "SELECT status, finished_at, last_error, cancelled_for FROM child"
    before = execute(engine, what)
    execute(engine, "UPDATE child SET b_id = 2")
    assert execute(engine, what) == before


def test_a_cancelled_job_that_somebody_has_completed_is_not_brought_back(engine: sa.Engine) -> None:
    _, child = make_dependent(on_failure="cancel")
    create(engine, child, rows="INSERT INTO parent (id) VALUES (1); INSERT INTO child (id, a_id) VALUES (1, 1)")
    execute(engine, set_status("parent", "failed", 1))
    execute(engine, "UPDATE child SET status = 'completed' WHERE status = 'cancelled'")
    execute(engine, set_status("parent", "pending", 1))
    assert execute(engine, "SELECT status FROM child") == [("completed",)]


def test_a_job_that_is_given_another_key_before_it_is_counted(engine: sa.Engine) -> None:
    _, child = make_dependent()
    create(engine, child, rows="INSERT INTO parent (id, status) VALUES (1, 'completed'), (2, 'pending')")
    execute(engine, "INSERT INTO child (id, a_id) VALUES (1, 1), (2, 2)", "UPDATE child SET id = id + 10")
    assert execute(engine, "SELECT status FROM child ORDER BY id") == [("pending",), ("waiting",)]


@pytest.mark.parametrize("held", [False, True])
def test_a_pending_job_that_is_given_another_parent_waits_for_it(engine: sa.Engine, *, held: bool) -> None:
    strategy = "batch_select" if held else "update_status"
    _, child = make_dependent(config={"strategy": strategy})
    rows = "INSERT INTO parent (id) VALUES (1), (2); INSERT INTO child (id) VALUES (1), (2)"
    create(engine, child, rows=rows)
    execute(engine, "UPDATE child SET a_id = id")
    assert execute(engine, "SELECT status, waits_for_count FROM child") == [("waiting", 1)] * 2


def test_a_cancelled_job_that_is_given_another_parent_is_back(engine: sa.Engine) -> None:
    _, child = make_dependent(on_failure="cancel")
    rows = """INSERT INTO parent (id) VALUES (1), (2), (3); INSERT INTO child (id, a_id) VALUES (1, 1), (2, 1);
        UPDATE parent SET status = 'failed' WHERE id = 1; UPDATE parent SET status = 'completed' WHERE id = 2"""
    create(engine, child, rows=rows)
    execute(engine, "UPDATE child SET a_id = 1 + id")
    assert execute(engine, "SELECT id, status FROM child ORDER BY id") == [(1, "pending"), (2, "waiting")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reconcile_mends_what_triggers_have_not_seen(engine: sa.Engine, strategy: str) -> None:
    batch, member = make_batch(config={"strategy": strategy}, members={"strategy": strategy})
    create(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}")
    execute(
        engine,
        "SET LOCAL session_replication_role = replica",
        "UPDATE member SET status = 'completed' WHERE id IN (1, 3)",
        "INSERT INTO batch (id, status, waits_for_count) VALUES (3, 'waiting', 1), (4, 'waiting', 7)",
        "INSERT INTO member (id, batch_id) VALUES (4, 4)",
    )
    with Session(engine) as session:
        assert faults(session, batch)
        assert set(session.scalars(reconcile(batch))) == {1, 2, 3, 4}
        session.commit()
        assert not faults(session, batch)
        session.execute(sa.text("TRUNCATE member"))
        session.commit()
        assert set(session.scalars(reconcile(batch))) == {1, 4}
        session.commit()
        assert not faults(session, batch)
    assert _batches(engine) == [("pending", 0)] * 4


def test_reconcile_mends_what_has_not_begun(engine: sa.Engine) -> None:
    """One that is pending too early, though its count is right; the counts of jobs that have begun are not kept."""
    batch = create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}; {set_status('batch', 'processing', 2)}")
    execute(engine, "SET LOCAL session_replication_role = replica", "UPDATE batch SET status = 'pending' WHERE id = 1")
    execute(engine, "UPDATE batch SET waits_for_count = 7 WHERE id = 2")
    with Session(engine) as session:
        assert session.scalars(reconcile(batch)).all() == [1]
        session.commit()
    assert _batches(engine) == [("waiting", 2), ("processing", 7)]


def test_a_count_that_is_too_low_is_not_negative(engine: sa.Engine) -> None:
    """The next member would be one of those that it waits for no more."""
    create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    execute(engine, "UPDATE batch SET waits_for_count = 1")
    execute(engine, "UPDATE member SET status = 'completed'")
    assert _batches(engine) == [("pending", 0)] * 2


@pytest.mark.parametrize(
    "statements",
    [
        [set_status("member", "completed", 1), "INSERT INTO member (id, batch_id) VALUES (9, 1)"],
        ["UPDATE batch SET status = 'processing' WHERE id = 1", set_status("member", "completed", 1, 2)],
        ["UPDATE child SET a_id = 2 WHERE id = 1"],
        ["UPDATE child SET status = 'processing' WHERE id = 1", "UPDATE child SET a_id = CASE id WHEN 2 THEN 2 END"],
    ],
    ids=["as many as before", "of a batch that has begun", "another parent", "no parent of one that has begun"],
)
def test_a_commit_writes_no_job_that_stays_as_it_is(engine: sa.Engine, statements: list[str]) -> None:
    base = new_base()
    make_dependent(base=base)
    rows = "INSERT INTO parent (id) VALUES (1), (2); INSERT INTO child (id, a_id) VALUES (1, 1), (2, 1)"
    create(engine, *make_batch(base=base), rows=f"{TWO}; {THREE_MEMBERS}; {rows}")
    with engine.connect() as connection:
        for each in statements:
            connection.exec_driver_sql(each)
        places = sa.text("SELECT batch.ctid::text, child.ctid::text FROM batch, child ORDER BY batch.id, child.id")
        before = connection.execute(places).all()
        connection.exec_driver_sql(APPLY)
        assert connection.execute(places).all() == before


RECORDED = {
    "INSERT INTO batch (id) SELECT n FROM generate_series(10, 25009) AS n": 3,
    "UPDATE batch SET is_open = true": 0,
    "INSERT INTO member (id) VALUES (9)": 0,
    "UPDATE member SET status = 'processing'": 0,
    "UPDATE member SET status = 'completed'": 1,
    "DELETE FROM member": 1,
    "UPDATE child SET status = 'cancelled'": 0,
    "UPDATE child SET status = 'waiting'": 1,
    "UPDATE child SET b_id = 1": 1,
    "UPDATE child SET a_id = NULL": 2,
}
"""What statements record, in rows of up to 10,000 keys."""


@pytest.mark.few(4)
@pytest.mark.parametrize("statement", RECORDED)
def test_what_a_statement_records(engine: sa.Engine, statement: str) -> None:
    base = new_base()
    batch, _ = make_batch(base=base)
    make_dependent(base=base)
    create(engine, batch, rows=f"{TWO}; {THREE_MEMBERS}; INSERT INTO parent (id) VALUES (1)")
    execute(engine, "INSERT INTO child (id, a_id) VALUES (1, 1)", "UPDATE child SET status = 'cancelled'")
    if "a_id" in statement or "b_id" in statement:
        execute(engine, "UPDATE child SET status = 'pending'")
    table = "sqlaqueue_waits_child" if "child" in statement else "sqlaqueue_waits_batch"
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
        assert connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == RECORDED[statement]


def test_one_notification_for_a_promoted_job(engine: sa.Engine) -> None:
    batch = create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    channel = channel_of(spec_of(batch))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listening:
        listening.exec_driver_sql(f'LISTEN "{channel}"')
        # This is how a Consumer tells that it waits for notifications.
        listening.execute(sa.func.pg_advisory_lock(*lock_numbers(channel)).select())
        raw: Any = listening.connection.driver_connection
        heard = []
        for statement, is_heard in (
            ("INSERT INTO member (id, batch_id) VALUES (4, 2)", False),
            (set_status("member", "completed", 1), False),
            (set_status("member", "failed", 2), True),
            (set_status("member", "completed", 3, 4), True),
            ("INSERT INTO batch (id) VALUES (3), (4)", True),
        ):
            execute(engine, statement)
            first = [*raw.notifies(timeout=10, stop_after=1)] if is_heard else []
            heard.append([each.payload.split()[2:] for each in (*first, *raw.notifies(timeout=0.05))])
        listening.exec_driver_sql("SELECT pg_advisory_unlock_all()")
    assert [[words[0] for words in each] for each in heard] == [[], [], ["1"], ["1"], ["1"]]
    assert all(words[1] == "0" for each in heard for words in each), "a promoted job is due at once"


SHAPES: dict[str, dict[str, Any]] = {
    "composite": {"keys": (sa.Integer, sa.String(9)), "key": (1, "a'\"\\{}")},
    "uuid": {"keys": (sa.Uuid,), "key": (uuid.UUID(int=7),)},
    "text": {"keys": (sa.Text,), "key": ("x\"y\\ 'é",)},
    "time": {"keys": (sa.DateTime(timezone=True),), "key": (datetime(2026, 3, 29, 2, 30, tzinfo=UTC),)},
    "bytes": {"keys": (sa.LargeBinary,), "key": (b"\x00\xff",)},
    "char": {"keys": (sa.CHAR(5), sa.Numeric(9, 2)), "key": ("ab", Decimal("1.50"))},
    "schema": {"table": {"schema": "other"}},
    "translated": {},
    "partitioned members": {},
    "partitioned batches": {},
    "enum": {},
    "native enum": {},
    "integers": {},
}


class State(enum.Enum):
    NEW, RUNS, DONE, BAD, GONE, WAITS = range(6)


def _own_columns(type_: Any, states: list[Any]) -> tuple[Any, Any]:
    """Return classes whose columns have names and values of their own."""
    names = ("pending", "processing", "completed", "failed", "cancelled", "waiting")

    def options() -> dict[str, Any]:
        return {"columns": {"status": "state"}, "states": States(**dict(zip(names, states, strict=True)))}

    def state() -> Any:
        return mapped_column("The State", type_, nullable=False, default=states[0])

    base, key = new_base(), {"id": mapped_column(sa.Integer, primary_key=True)}
    count = {"left": mapped_column("left %", sa.Integer, server_default="1")}
    link = {"state": state(), "members": relationship("Member", back_populates="batch")}
    mine = options()
    mine["columns"]["waits_for_count"] = "left"
    batch = job_class(base, "Batch", key | count | link, waits_for="members", **mine)
    to = {"batch_id": mapped_column("Batch", sa.ForeignKey("batch.id"))}
    back = {"state": state(), "batch": relationship("Batch", back_populates="members")}
    own_key = {"id": mapped_column(sa.Integer, primary_key=True)}
    return batch, job_class(base, "Member", own_key | to | back, **options())


def _shape(engine: sa.Engine, name: str) -> tuple[sa.Engine, Any, Any]:
    """Return an engine on the tables of a shape of batches, and its classes."""
    options = {option: value for option, value in SHAPES[name].items() if option != "key"}
    if "enum" in name:
        batch, member = _own_columns(sa.Enum(State, native_enum=name.startswith("native")), list(State))
    elif name == "integers":
        batch, member = _own_columns(sa.SmallInteger, [5, 4, 3, 2, 1, 0])
    else:
        batch, member = make_batch(**options)
    if name.startswith("partitioned"):
        table = (member if name.endswith("members") else batch).__table__
        table.dialect_options["postgresql"]["partition_by"] = "HASH (id)"
        for number in range(2):
            ddl: Any = sa.DDL  # SQLAlchemy 2.0 gives it no types
            part = f"CREATE TABLE part_{number} PARTITION OF {table} FOR VALUES WITH (MODULUS 2, REMAINDER {number})"
            sa.event.listen(table, "after_create", ddl(part))
    if name in {"schema", "translated"}:
        execute(engine, "CREATE SCHEMA other")
    bound = engine.execution_options(schema_translate_map={None: "other"}) if name == "translated" else engine
    batch.metadata.create_all(bound)
    return bound, batch, member


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(engine: sa.Engine, name: str) -> None:
    """A batch runs when its members have ended, and waits again for one that is requeued; then it is cancelled."""
    bound, batch, member = _shape(engine, name)
    key = SHAPES[name].get("key", (1,))
    names = [column.key for column in batch.__table__.primary_key]
    try:
        with Session(bound, expire_on_commit=False) as session:
            job = batch(**dict(zip(names, key, strict=True)), members=[member(id=1), member(id=2)])
            session.add(job)
            session.commit()
            assert not session.scalars(claim(batch, 5)).all()
            first, second = session.scalars(claim(member, 5)).all()
            session.execute(complete(first))
            session.commit()
            assert not faults(session, batch)
            session.execute(fail(second))
            session.commit()
            session.execute(complete(session.scalars(claim(batch, 5)).one()))
            session.commit()
            assert [row[1] for row in session.execute(requeue(second))] == [True]
            assert [row[1] for row in session.execute(requeue(job))] == [True]
            session.commit()
            assert not session.scalars(claim(batch, 5)).all()
            assert not faults(session, batch)
            assert not session.scalars(reconcile(batch)).all()
            assert len(session.scalars(cancel(job)).all()) == 1
            session.commit()
            assert not session.scalars(claim(member, 5)).all()
    finally:
        if name in {"schema", "translated"}:
            execute(engine, "DROP SCHEMA other CASCADE")


@pytest.mark.parametrize("on_failure", ["block", "continue", "cancel"])
@pytest.mark.parametrize("to_many", [False, True])
def test_trees(engine: sa.Engine, on_failure: str, *, to_many: bool) -> None:
    """A failure at one end of several levels, and the way back."""
    node = create(engine, make_tree(to_many=to_many, on_failure=on_failure), rows=LEVELS)
    leaf = 5 if to_many else 1
    execute(engine, set_status("node", "failed", leaf))
    others = {"block": "waiting", "cancel": "cancelled"}.get(on_failure, "waiting")
    waiting = [(4, 2, 1), (2, 3, 4, 5)][not to_many]
    found = dict(execute(engine, "SELECT id, status FROM node"))
    first = (4, 2)[not to_many]
    expected = dict.fromkeys(waiting, others)
    if on_failure == "continue":
        expected[first] = "pending"
    assert {key: found[key] for key in waiting} == expected
    with Session(engine) as session:
        assert not faults(session, node)
        session.execute(requeue(sa.select(node).where(node.id == leaf)))
        session.commit()
        assert not faults(session, node)
        order = []
        while jobs := session.scalars(claim(node, 9)).all():
            order += [job.id for job in jobs]
            session.execute(complete(jobs))
            session.commit()
            assert not faults(session, node)
    assert sorted(order) == [1, 2, 3, 4, 5]
    edges = [(1, 2), (2, 3), (2, 4), (4, 5)]
    assert all((order.index(a) > order.index(b)) == to_many for a, b in edges)


def test_cancel_of_nested_batches(engine: sa.Engine) -> None:
    node = create(engine, make_tree(to_many=True), rows=LEVELS)
    with Session(engine) as session:
        assert session.scalars(cancel(sa.select(node).where(node.id == 1))).all() == [1]
        session.commit()
        assert set(session.scalars(sa.select(node.status))) == {"cancelled"}
        assert not faults(session, node)


@pytest.mark.parametrize("held", [False, True])
def test_cancel_of_a_batch_whose_members_run(engine: sa.Engine, *, held: bool) -> None:
    """It waits for none of them, and requests the cancellation of each."""
    strategy = "batch_select" if held else "update_status"
    batch, member = make_batch(members={"strategy": strategy})
    others = "INSERT INTO member (id, batch_id, status) VALUES (4, 1, 'completed'), (5, 1, 'pending')"
    create(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}; {others}")
    some = sa.select(member).where(member.id.in_([1, 3]))
    with Session(engine) as running, engine.connect() as listening:
        assert len(running.scalars(claim(some, 5)).all()) == 2
        if not held:
            running.commit()
        listening.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(
            f'LISTEN "{channel_of(spec_of(member))}"'
        )
        with Session(engine) as session:
            session.execute(cancel(some.where(member.id == 1)))
            session.commit()
        execute(engine, "UPDATE sqlaqueue_control SET created_at = '2026-01-01'")
        raw: Any = listening.connection.driver_connection
        [_] = raw.notifies(timeout=10, stop_after=1)
        execute(engine, "SET LOCAL lock_timeout = '300ms'", set_status("batch", "cancelled", 1))
        [heard] = raw.notifies(timeout=10, stop_after=1)
        assert heard.payload == str(Signal.CANCEL_REQUESTED)
    assert execute(engine, "SELECT queue, key::text, created_at > '2026-01-01' FROM sqlaqueue_control") == [
        ("member", "[1]", True)
    ]
    expected = ["cancelled", "pending" if held else "processing", "completed", "cancelled"]
    found = execute(engine, "SELECT status FROM member WHERE id <> 1 ORDER BY id")
    assert found == [(each,) for each in expected]


def test_cancel_of_a_batch_with_a_quarantined_member(engine: sa.Engine) -> None:
    """The token of one that is pending would have it looked for among those that are run apart."""
    create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}; UPDATE member SET lease_token = gen_random_uuid()")
    execute(engine, set_status("batch", "cancelled", 1))
    assert execute(engine, "SELECT status, lease_token IS NULL FROM member ORDER BY id") == [
        ("cancelled", True),
        ("cancelled", True),
        ("pending", False),
    ]
