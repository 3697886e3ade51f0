"""Single operations on jobs that wait for others: statements, deletes, shapes of keys and tables, trees, repairs."""

import enum
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
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
from tests.waits.driver import APPLY, COMMIT, Step, driving, interleavings
from tests.waits.models import STRATEGIES, faults, job_class, make_batch, make_dependent, make_tree

pytestmark = pytest.mark.once


def _set(table: str, status: str, *keys: int) -> str:
    return f"UPDATE {table} SET status = '{status}' WHERE id IN ({', '.join(map(str, keys))})"


def _tx(engine: sa.Engine, *statements: str, isolation: str | None = None) -> Any:
    """Execute statements in a transaction; return the rows of the last one."""
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": isolation} if isolation else None)
        for each in statements:
            result: Any = session.execute(sa.text(each))
        rows = [tuple(row) for row in result] if result.returns_rows else None
        session.commit()
        return rows


def _prepare(engine: sa.Engine, *models: Any, rows: str = "SELECT 1") -> Any:
    models[0].metadata.create_all(engine)
    _tx(engine, rows)
    return models[0]


def _batches(engine: sa.Engine) -> list[Any]:
    return _tx(engine, "SELECT status, waits_for_count FROM batch ORDER BY id") or []


TWO = "INSERT INTO batch (id) VALUES (1), (2)"
THREE_MEMBERS = "INSERT INTO member (id, batch_id) VALUES (1, 1), (2, 1), (3, 2)"
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
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements(engine: sa.Engine, name: str) -> None:
    """Whatever a statement does, the counts are those of the states."""
    statements, counts = STATEMENTS[name]
    batch = _prepare(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    _tx(engine, *statements)
    with engine.connect() as connection:
        assert not faults(connection, batch)
    assert [count for _, count in _batches(engine)] == counts


def test_copy(engine: sa.Engine) -> None:
    batch = _prepare(engine, *make_batch(), rows=TWO)
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection  # of psycopg
        with raw.cursor().copy("COPY member (id, batch_id) FROM STDIN") as copy:
            for number in range(25_000):
                copy.write_row((number, 1 + number % 2))
        raw.commit()
    assert _batches(engine) == [("waiting", 12_500), ("waiting", 12_500)]
    _tx(engine, "UPDATE member SET status = 'completed' WHERE batch_id = 1")
    assert _batches(engine) == [("pending", 0), ("waiting", 12_500)]
    with engine.connect() as connection:
        assert not faults(connection, batch)


def test_an_empty_batch_is_due_and_an_open_one_waits_until_it_is_closed(engine: sa.Engine) -> None:
    _prepare(engine, *make_batch(), rows="INSERT INTO batch (id, is_open) VALUES (1, false), (2, true), (3, true)")
    _tx(engine, "INSERT INTO member (id, batch_id) VALUES (1, 3)", "UPDATE member SET status = 'completed'")
    assert _batches(engine) == [("pending", 0), ("waiting", 0), ("waiting", 0)]
    _tx(engine, "UPDATE batch SET is_open = false")
    assert _batches(engine) == [("pending", 0)] * 3


@pytest.mark.parametrize("held", [False, True])
def test_a_batch_that_is_opened_again_waits_for_what_it_did_not_count(engine: sa.Engine, *, held: bool) -> None:
    """Where a transaction holds the job that it runs, the counts of pending jobs are not kept."""
    strategy = "batch_select" if held else "update_status"
    batch, member = make_batch(config={"strategy": strategy}, members={"strategy": strategy})
    _prepare(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}; {_set('member', 'completed', 1, 2, 3)}")
    assert _batches(engine) == [("pending", 0)] * 2
    _tx(engine, _set("member", "pending", 1))
    assert _batches(engine) == [("pending", 0) if held else ("waiting", 1), ("pending", 0)]
    _tx(engine, "UPDATE batch SET is_open = true")
    assert _batches(engine) == [("waiting", 1), ("waiting", 0)]
    _tx(engine, "UPDATE batch SET is_open = false")
    assert _batches(engine) == [("waiting", 1), ("pending", 0)]
    with engine.connect() as connection:
        assert not faults(connection, batch)


def test_a_job_that_has_waited_is_due_from_then_on(engine: sa.Engine) -> None:
    """It is not late; but a time to come stays."""
    past, future = "now() - interval '1 day'", "now() + interval '1 day'"
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE batch SET run_at = CASE id WHEN 1 THEN {past} ELSE {future} END"
    _prepare(engine, *make_batch(), rows=rows)
    [(before,)] = _tx(engine, "SELECT clock_timestamp()") or []
    _tx(engine, "UPDATE member SET status = 'completed'")
    [(first, _), (second, other)] = _tx(engine, f"SELECT run_at, {future} FROM batch ORDER BY id") or []
    assert first > before
    assert abs((other - second).total_seconds()) < 60


def test_a_job_that_is_back_is_due_from_then_on(engine: sa.Engine) -> None:
    """Even if what it was cancelled for is requeued and completed in one transaction, so that it need not wait."""
    _, child = make_dependent(on_failure="cancel")
    rows = """INSERT INTO parent (id) VALUES (1); INSERT INTO child (id, a_id) VALUES (1, 1);
        UPDATE parent SET status = 'failed'; UPDATE child SET run_at = now() - interval '1 day'"""
    _prepare(engine, child, rows=rows)
    [(before,)] = _tx(engine, "SELECT clock_timestamp() FROM child WHERE status = 'cancelled'")
    _tx(engine, _set("parent", "pending", 1), _set("parent", "completed", 1))
    [(status, run_at)] = _tx(engine, "SELECT status, run_at FROM child")
    assert status == "pending"
    assert run_at > before


def test_a_batch_with_another_key_is_counted_once(engine: sa.Engine) -> None:
    """Its members follow it, which looks as if they were added."""
    batch, member = make_batch(onupdate="CASCADE")
    _prepare(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}")
    _tx(engine, "UPDATE batch SET id = id + 10")
    assert _batches(engine) == [("waiting", 2), ("waiting", 1)]


def test_a_batch_is_cancelled_once(engine: sa.Engine) -> None:
    """Members that come back are not cancelled by a later change of the row."""
    _prepare(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    _tx(engine, _set("batch", "cancelled", 1))
    assert _tx(engine, "SELECT status FROM member ORDER BY id") == [("cancelled",), ("cancelled",), ("pending",)]
    _tx(engine, _set("member", "pending", 1), "UPDATE batch SET is_open = true")
    assert _tx(engine, "SELECT status FROM member ORDER BY id") == [("pending",), ("cancelled",), ("pending",)]


@pytest.mark.parametrize("add", ["INSERT INTO member (id, batch_id) VALUES (9, 1)", _set("member", "pending", 3)])
@pytest.mark.parametrize("state", ["processing", "completed", "failed", "cancelled"])
def test_a_batch_that_has_begun_takes_no_member(engine: sa.Engine, state: str, add: str) -> None:
    """At the statement, or at the commit if the batch begins in between; a member that comes back is no new one."""
    rows = f"{TWO}; {THREE_MEMBERS}; UPDATE member SET status = 'completed', batch_id = 1"
    _prepare(engine, *make_batch(), rows=rows)
    is_new = add.startswith("INSERT")
    with engine.connect() as first:
        first.execute(sa.text(add))
        _tx(engine, f"UPDATE batch SET status = '{state}' WHERE id = 1")
        if is_new:
            with pytest.raises(sa.exc.IntegrityError, match="Batch 1 has begun or ended: it takes no further Member"):
                first.exec_driver_sql(APPLY)
        else:
            first.commit()
    if is_new:
        with pytest.raises(sa.exc.IntegrityError, match="Batch 1 has begun or ended: it takes no further Member"):
            _tx(engine, add)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM member")) == 3


@pytest.mark.parametrize("shape", ["batch", "dependent"])
def test_no_open_transaction_holds_up_a_settlement(engine: sa.Engine, shape: str) -> None:
    """Neither one that adds members or dependants, nor another settlement of the same batch or job."""
    if shape == "batch":
        model = _prepare(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
        add, end = (
            "INSERT INTO member (id, batch_id) VALUES (8, 1)",
            "UPDATE member SET status = 'completed' WHERE id = ",
        )
    else:
        parent, model = make_dependent()
        rows = "INSERT INTO parent (id) VALUES (1), (2); INSERT INTO child (id, a_id, b_id) VALUES (1, 1, 2)"
        _prepare(engine, parent, rows=rows)
        add, end = (
            "INSERT INTO child (id, a_id, b_id) VALUES (8, 1, 2)",
            "UPDATE parent SET status = 'completed' WHERE id = ",
        )
    limit = "SET LOCAL lock_timeout = '300ms'"
    with engine.connect() as first, engine.connect() as second:
        first.execute(sa.text(add))
        second.execute(sa.text(f"{end}1"))
        _tx(engine, limit, f"{end}2")
        second.rollback()
        _tx(engine, limit, f"{end}1")
        first.commit()
        assert not faults(first, model)


def test_a_commit_reads_what_its_statements_have_recorded_once(engine: sa.Engine) -> None:
    """The trigger fires for each of them, and rows that it has deleted stay in the index until the commit."""
    number = 300
    batch = _prepare(engine, *make_batch(), rows=TWO)
    add = f"FOR n IN 1..{number} LOOP INSERT INTO member (id, batch_id) VALUES (n, 1); END LOOP"
    index = f"{spec_of(batch).side_tables['waits'].name}_pkey"
    read = f"SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = '{index}'"
    flush = "SELECT pg_stat_force_next_flush()"
    [(before,)] = _tx(engine, flush, read)
    _tx(engine, flush, f"DO 'BEGIN {add}; END'")
    [(after,)] = _tx(engine, read)
    assert _batches(engine)[0] == ("waiting", number)
    assert number <= after - before < 10 * number


def test_two_parents_that_end_at_once_lock_their_children_in_one_order(engine: sa.Engine) -> None:
    number = 3000
    rows = f"""INSERT INTO parent (id) VALUES (1), (2);
        INSERT INTO child (id, a_id, b_id) SELECT n, 1 + n % 2, 2 - n % 2 FROM generate_series(1, {number}) AS n"""
    parent, child = make_dependent()
    _prepare(engine, parent, rows=rows)
    for status in ("completed", "pending", "completed"):
        both = threading.Barrier(2)

        def end(key: int, status: str = status, both: threading.Barrier = both) -> None:
            with engine.begin() as connection:
                connection.execute(sa.text(_set("parent", status, key)))
                both.wait(10)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(end, (1, 2)))
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM child WHERE status = 'pending'")) == number
        assert not faults(connection, child)


@pytest.mark.parametrize("ondelete", [None, "CASCADE", "SET NULL"])
@pytest.mark.parametrize("on_failure", ["block", "continue", "cancel"])
def test_deletes(engine: sa.Engine, on_failure: str, ondelete: str | None) -> None:
    batch, member = make_batch(on_failure=on_failure, ondelete=ondelete)
    _prepare(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}")
    _tx(engine, "DELETE FROM member WHERE id < 3")
    assert _batches(engine) == [("pending", 0), ("waiting", 1)]
    if ondelete is not None:
        _tx(engine, "DELETE FROM batch WHERE id = 2")
        assert _tx(engine, "SELECT batch_id FROM member") == ([] if ondelete == "CASCADE" else [(None,)])
    parent, child = make_dependent(on_failure=on_failure, ondelete=ondelete)
    rows = """INSERT INTO parent (id, status) VALUES (1, 'pending'), (2, 'pending'), (3, 'completed');
        INSERT INTO child (id, a_id, b_id) VALUES (1, 1, NULL), (2, 1, 2), (3, 3, 2), (4, 3, NULL)"""
    _prepare(engine, parent, rows=rows)
    delete = "DELETE FROM parent WHERE id IN (1, 3)"
    if ondelete is None:
        with pytest.raises(sa.exc.IntegrityError, match="foreign key"):
            _tx(engine, delete)
        return
    _tx(engine, delete)
    lost = ["pending", "waiting"] if on_failure == "continue" else ["cancelled", "cancelled"]
    expected = [] if ondelete == "CASCADE" else [*lost, "waiting", "pending"]
    assert _tx(engine, "SELECT status FROM child ORDER BY id") == [(each,) for each in expected]
    with engine.connect() as connection:
        assert not faults(connection, child, batch)


@pytest.mark.parametrize("mode", ["DEFERRED", "IMMEDIATE"])
def test_a_job_whose_reference_is_taken_away_is_cancelled(engine: sa.Engine, mode: str) -> None:
    _, child = make_dependent(on_failure="block")
    rows = """INSERT INTO parent (id, status) VALUES (1, 'failed'), (2, 'completed');
        INSERT INTO child (id, a_id) VALUES (1, 1), (2, 2)"""
    _prepare(engine, child, rows=rows)
    _tx(engine, f"SET CONSTRAINTS ALL {mode}", "UPDATE child SET a_id = NULL")
    assert _tx(engine, "SELECT status FROM child ORDER BY id") == [("cancelled",), ("pending",)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reconcile_mends_what_triggers_have_not_seen(engine: sa.Engine, strategy: str) -> None:
    batch, member = make_batch(config={"strategy": strategy}, members={"strategy": strategy})
    _prepare(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}")
    _tx(
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


def test_one_notification_for_a_promoted_job(engine: sa.Engine) -> None:
    batch = _prepare(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}")
    channel = channel_of(spec_of(batch))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listening:
        listening.exec_driver_sql(f'LISTEN "{channel}"')
        # This is how a Consumer tells that it waits for notifications.
        listening.execute(sa.func.pg_advisory_lock(*lock_numbers(channel)).select())
        raw: Any = listening.connection.driver_connection
        heard = []
        for statement in (
            "INSERT INTO member (id, batch_id) VALUES (4, 2)",
            _set("member", "completed", 1),
            _set("member", "failed", 2),
            _set("member", "completed", 3, 4),
            "INSERT INTO batch (id) VALUES (3), (4)",
        ):
            _tx(engine, statement)
            heard.append([each.payload.split()[2:] for each in raw.notifies(timeout=0.05)])
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
        _tx(engine, "CREATE SCHEMA other")
    bound = engine.execution_options(schema_translate_map={None: "other"}) if name == "translated" else engine
    batch.metadata.create_all(bound)
    return bound, batch, member


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
            _tx(engine, "DROP SCHEMA other CASCADE")


LEVELS = "INSERT INTO node (id, parent_id) VALUES (1, NULL), (2, 1), (3, 2), (4, 2), (5, 4)"


@pytest.mark.parametrize("on_failure", ["block", "continue", "cancel"])
@pytest.mark.parametrize("to_many", [False, True])
def test_trees(engine: sa.Engine, on_failure: str, *, to_many: bool) -> None:
    """A failure at one end of several levels, and the way back."""
    node = _prepare(engine, make_tree(to_many=to_many, on_failure=on_failure), rows=LEVELS)
    leaf = 5 if to_many else 1
    _tx(engine, _set("node", "failed", leaf))
    others = {"block": "waiting", "cancel": "cancelled"}.get(on_failure, "waiting")
    waiting = [(4, 2, 1), (2, 3, 4, 5)][not to_many]
    found = dict(_tx(engine, "SELECT id, status FROM node"))
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
    node = _prepare(engine, make_tree(to_many=True), rows=LEVELS)
    with Session(engine) as session:
        assert session.scalars(cancel(sa.select(node).where(node.id == 1))).all() == [1]
        session.commit()
        assert set(session.scalars(sa.select(node.status))) == {"cancelled"}
        assert not faults(session, node)


def test_cancel_of_a_nested_batch_that_is_counted_at_this_moment(engine: sa.Engine) -> None:
    """Its row is locked for the length of a commit only."""
    node = _prepare(engine, make_tree(to_many=True), rows=LEVELS)
    programs: dict[str, list[Step]] = {
        "A": [_set("node", "completed", 3), APPLY, COMMIT],
        "B": [_set("node", "cancelled", 1), COMMIT],
    }
    with driving(engine, A=None, B=None) as driver:
        assert not driver.drive(programs, "AABAB")
        assert not faults(driver.watcher, node)
    assert _tx(engine, "SELECT id, status FROM node WHERE status <> 'cancelled'") == [(3, "completed")]


@pytest.mark.parametrize("held", [False, True])
def test_cancel_of_a_batch_whose_members_run(engine: sa.Engine, *, held: bool) -> None:
    """It waits for none of them, and requests the cancellation of each."""
    strategy = "batch_select" if held else "update_status"
    batch, member = make_batch(members={"strategy": strategy})
    others = "INSERT INTO member (id, batch_id, status) VALUES (4, 1, 'completed'), (5, 1, 'pending')"
    _prepare(engine, batch, member, rows=f"{TWO}; {THREE_MEMBERS}; {others}")
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
        _tx(engine, "UPDATE sqlaqueue_control SET created_at = '2026-01-01'")
        raw: Any = listening.connection.driver_connection
        list(raw.notifies(timeout=0.05))
        _tx(engine, "SET LOCAL lock_timeout = '300ms'", _set("batch", "cancelled", 1))
        assert [each.payload for each in raw.notifies(timeout=0.05)] == [str(Signal.CANCEL_REQUESTED)]
    assert _tx(engine, "SELECT queue, key::text, created_at > '2026-01-01' FROM sqlaqueue_control") == [
        ("member", "[1]", True)
    ]
    expected = ["cancelled", "pending" if held else "processing", "completed", "cancelled"]
    found = _tx(engine, "SELECT status FROM member WHERE id <> 1 ORDER BY id")
    assert found == [(each,) for each in expected]


def test_cancel_of_a_batch_with_a_quarantined_member(engine: sa.Engine) -> None:
    """The token of one that is pending would have it looked for among those that are run apart."""
    _prepare(engine, *make_batch(), rows=f"{TWO}; {THREE_MEMBERS}; UPDATE member SET lease_token = gen_random_uuid()")
    _tx(engine, _set("batch", "cancelled", 1))
    assert _tx(engine, "SELECT status, lease_token IS NULL FROM member ORDER BY id") == [
        ("cancelled", True),
        ("cancelled", True),
        ("pending", False),
    ]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation(engine: sa.Engine, isolation: str) -> None:
    """A program whose snapshot is older than the end of a parent is refused, or has seen the end."""
    parent, child = make_dependent()
    _prepare(engine, parent, rows="INSERT INTO parent (id) VALUES (1), (2)")
    with driving(engine, A=isolation, B=None) as driver:
        programs: dict[str, list[Step]] = {
            "A": ["SELECT 1 FROM parent", "INSERT INTO child (id, a_id) VALUES (1, 1)", APPLY, COMMIT],
            "B": [_set("parent", "completed", 1), APPLY, COMMIT],
        }
        for order in interleavings(4, 3):
            _tx(engine, "DELETE FROM child", _set("parent", "pending", 1))
            errors = driver.drive(programs, order)
            assert all(error.startswith("40001") for error in errors), (order, errors)
            assert not faults(driver.watcher, child), order
