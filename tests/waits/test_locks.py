"""What transactions with jobs that wait lock at their commit, and in which order."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim
from sqlaqueue.mapping.mixin import spec_of
from tests.models import new_base
from tests.waits.driver import APPLY, COMMIT, Step, driving, interleavings
from tests.waits.models import (
    LEVELS,
    THREE_MEMBERS,
    TWO,
    create,
    execute,
    faults,
    make_batch,
    make_dependent,
    make_tree,
    set_status,
)

pytestmark = pytest.mark.once


@pytest.mark.parametrize("shape", ["batch", "dependent"])
def test_no_open_transaction_holds_up_a_settlement(engine: sa.Engine, shape: str) -> None:
    """Neither one that adds members or dependants, nor another settlement of the same batch or job."""
    if shape == "batch":
        model = create(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
        add, end = (
            "INSERT INTO member (id, batch_id) VALUES (8, 1)",
            "UPDATE member SET status = 'completed' WHERE id = ",
        )
    else:
        parent, model = make_dependent()
        rows = "INSERT INTO parent (id) VALUES (1), (2); INSERT INTO child (id, a_id, b_id) VALUES (1, 1, 2)"
        create(engine, parent, rows=rows)
        add, end = (
            "INSERT INTO child (id, a_id, b_id) VALUES (8, 1, 2)",
            "UPDATE parent SET status = 'completed' WHERE id = ",
        )
    limit = "SET LOCAL lock_timeout = '300ms'"
    with engine.connect() as first, engine.connect() as second:
        first.execute(sa.text(add))
        second.execute(sa.text(f"{end}1"))
        execute(engine, limit, f"{end}2")
        second.rollback()
        execute(engine, limit, f"{end}1")
        first.commit()
        assert not faults(first, model)


@pytest.mark.parametrize("mode", ["DEFERRED", "IMMEDIATE"])
def test_a_commit_reads_what_its_statements_have_recorded_once(engine: sa.Engine, mode: str) -> None:
    """The trigger fires for each of them, and rows that it has deleted stay in the index until the commit."""
    number = 300
    batch = create(engine, *make_batch(), rows=TWO)
    add = f"FOR n IN 1..{number} LOOP INSERT INTO member (id, batch_id) VALUES (n, 1); END LOOP"
    index = f"{spec_of(batch).side_tables['waits'].name}_pkey"
    read = f"SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = '{index}'"
    flush = "SELECT pg_stat_force_next_flush()"
    [(before,)] = execute(engine, flush, read)
    execute(engine, flush, f"SET CONSTRAINTS ALL {mode}", f"DO 'BEGIN {add}; END'")
    [(after,)] = execute(engine, read)
    assert execute(engine, "SELECT waits_for_count FROM batch WHERE id = 1") == [(number,)]
    assert number <= after - before < 10 * number


def _in_one_bucket(engine: sa.Engine) -> tuple[int, int]:
    """Return two keys that have the same advisory lock."""
    keys = """SELECT min(n), max(n) FROM generate_series(1, 999) AS n
        GROUP BY hashtext(jsonb_build_array(n)::text) % 128 HAVING count(*) > 1 LIMIT 1"""
    [(first, second)] = execute(engine, keys)
    return first, second


PARENTS = "INSERT INTO parent (id) VALUES ({0}), ({1})"
END = "UPDATE parent SET status = 'completed' WHERE id = {0}"
REQUEUE = "UPDATE batch SET status = 'pending' WHERE id = {0}"
WITH_TWO = "INSERT INTO child (id, a_id, b_id) VALUES (1, {1}, {1})"
WITH_PARENT = "INSERT INTO parent (id) VALUES ({0}); INSERT INTO child (id, a_id) VALUES ({0}, {0})"


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        (PARENTS, END, END),
        ("SELECT 1", "INSERT INTO child (id) VALUES ({0})", "INSERT INTO child (id) VALUES ({0})"),
        ("SELECT 1", WITH_PARENT, WITH_PARENT),
        (f"{PARENTS}; INSERT INTO batch (id, status) VALUES ({{0}}, 'completed')", REQUEUE, END),
        (f"{PARENTS}; {WITH_TWO}", END, "UPDATE child SET b_id = NULL"),
        (PARENTS, "INSERT INTO child (id, a_id) VALUES (1, {0})", "UPDATE parent SET attempts = 1 WHERE id = {1}"),
    ],
    ids=[
        "end",
        "without parents",
        "with its parent",
        "end in another relation",
        "other reference",
        "claim of a parent",
    ],
)
def test_a_commit_waits_for_no_other(engine: sa.Engine, rows: str, first: str, second: str) -> None:
    """Though their keys have the same lock."""
    keys, base = _in_one_bucket(engine), new_base()
    make_batch(base=base)
    create(engine, *make_dependent(base=base), rows=rows.format(*keys))
    with engine.connect() as connection:
        for each in (first.format(*keys), APPLY):
            connection.execute(sa.text(each))
        execute(engine, "SET LOCAL lock_timeout = '300ms'", second.format(*reversed(keys)))


def _commit_together(engine: sa.Engine, *statements: str) -> None:
    """Execute statements in transactions of their own, which commit at the same moment."""
    all_ready = threading.Barrier(len(statements))

    def change(statement: str) -> None:
        with engine.begin() as connection:
            connection.execute(sa.text(statement))
            all_ready.wait(10)

    with ThreadPoolExecutor(len(statements)) as pool:
        list(pool.map(change, statements))


def test_advisory_locks_are_taken_in_one_order(engine: sa.Engine) -> None:
    """A commit that waits for one of them has those before it, and none behind it."""
    create(engine, *make_dependent(), rows="INSERT INTO parent (id) SELECT n FROM generate_series(1, 100) AS n")
    middle = "SELECT id FROM parent ORDER BY hashtext(jsonb_build_array(id)::text) % 128 OFFSET 50 LIMIT 1"
    locks = "SELECT objid::bigint::bit(32)::integer, granted FROM pg_locks WHERE locktype = 'advisory' AND pid = {}"
    with engine.connect() as connection, driving(engine, A=None) as driver:
        for each in (f"INSERT INTO child (id, a_id) SELECT 0, parent.id FROM ({middle}) AS parent", APPLY):
            connection.execute(sa.text(each))
        actor = driver.actors["A"]
        actor.submit("INSERT INTO child (id, a_id) SELECT id, id FROM parent")
        actor.submit(APPLY)
        assert driver.is_blocked(actor)
        found = execute(engine, locks.format(actor.pid))
        connection.rollback()
        assert not driver.is_blocked(actor)
    [awaited] = [bucket for bucket, granted in found if not granted]
    held = [bucket for bucket, granted in found if granted]
    assert len(held) > 10
    assert max(held) < awaited


def test_two_parents_that_end_at_once_lock_their_children_in_one_order(engine: sa.Engine) -> None:
    number = 3000
    rows = f"""INSERT INTO parent (id) VALUES (1), (2);
        INSERT INTO child (id, a_id, b_id) SELECT n, 1 + n % 2, 2 - n % 2 FROM generate_series(1, {number}) AS n"""
    parent, child = make_dependent()
    create(engine, parent, rows=rows)
    for status in ("completed", "pending", "completed"):
        _commit_together(engine, *(set_status("parent", status, key) for key in (1, 2)))
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM child WHERE status = 'pending'")) == number
        assert not faults(connection, child)


def test_cancel_of_a_nested_batch_that_is_counted_at_this_moment(engine: sa.Engine) -> None:
    """Its row is locked for the length of a commit only."""
    node = create(engine, make_tree(to_many=True), rows=LEVELS)
    programs: dict[str, list[Step]] = {
        "A": [set_status("node", "completed", 3), APPLY, COMMIT],
        "B": [set_status("node", "cancelled", 1), COMMIT],
    }
    with driving(engine, A=None, B=None) as driver:
        assert not driver.drive(programs, "AABAB")
        assert not faults(driver.watcher, node)
    assert execute(engine, "SELECT id, status FROM node WHERE status <> 'cancelled'") == [(3, "completed")]


def test_cancel_of_a_nested_batch_that_runs(engine: sa.Engine) -> None:
    """Its row is locked for as long as its handler runs."""
    node = create(engine, make_tree(to_many=True, strategy="batch_select"), rows=LEVELS)
    for keys in ((3, 5), (4,)):
        execute(engine, set_status("node", "completed", *keys))
    with Session(engine) as session:
        assert [job.id for job in session.scalars(claim(node, 1))] == [2]
        execute(engine, "SET LOCAL lock_timeout = '300ms'", set_status("node", "cancelled", 1))
    assert execute(engine, "SELECT key::text FROM sqlaqueue_control") == [("[2]",)]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation(engine: sa.Engine, isolation: str) -> None:
    """A program whose snapshot is older than the end of a parent is refused, or has seen the end."""
    parent, child = make_dependent()
    create(engine, parent, rows="INSERT INTO parent (id) VALUES (1), (2)")
    with driving(engine, A=isolation, B=None) as driver:
        programs: dict[str, list[Step]] = {
            "A": ["SELECT 1 FROM parent", "INSERT INTO child (id, a_id) VALUES (1, 1)", APPLY, COMMIT],
            "B": [set_status("parent", "completed", 1), APPLY, COMMIT],
        }
        for order in interleavings(4, 3):
            execute(engine, "DELETE FROM child", set_status("parent", "pending", 1))
            errors = driver.drive(programs, order)
            assert all(error.startswith("40001") for error in errors), (order, errors)
            assert not faults(driver.watcher, child), order
