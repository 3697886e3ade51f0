"""Every pair of operations in two transactions, statement by statement, in every order.

After each of them the counts are those of the states, nothing is pending too early and nothing waits for nothing. The
step APPLY is the moment within a commit in which its changes are made but not yet visible to others.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, complete, fail, reconcile, requeue
from tests.servers import Server
from tests.waits.driver import APPLY, COMMIT, ROLLBACK, Driver, Step, driving, interleavings
from tests.waits.models import faults, make_batch, make_dependent

pytestmark = pytest.mark.once

PARENT, CHILD = make_dependent()
HEIR_PARENT, HEIR = make_dependent(on_failure="cancel")
BATCH, MEMBER = make_batch()
STRICT, STRICT_MEMBER = make_batch(on_failure="cancel")
SELECTED: dict[str, Any] = {"strategy": "batch_select"}
MESSAGES: dict[str, Any] = {"strategy": "delete_returning"}


def _set(table: str, status: str, *keys: int) -> str:
    more = ", finished_at = now()" if status in {"completed", "failed", "cancelled"} else ", finished_at = NULL"
    # In the order of the keys, as two that update the same rows would otherwise wait for each other.
    some = f"SELECT id FROM {table} WHERE id IN ({', '.join(map(str, keys))}) ORDER BY id FOR NO KEY UPDATE"
    return (
        f"WITH locked AS ({some}) UPDATE {table} AS t SET status = '{status}'{more} FROM locked WHERE t.id = locked.id"
    )


def _by_key(verb: Callable[..., Any], model: Any, key: int) -> Callable[[Session], Any]:
    def step(session: Session) -> Any:
        return list(session.execute(verb(sa.select(model).where(model.id == key))))

    return step


def _run(model: Any, verb: Callable[..., Any]) -> Callable[[Session], Any]:
    """Claim what can be claimed, and end it."""

    def step(session: Session) -> None:
        if jobs := session.scalars(claim(model, 10)).all():
            session.execute(verb(jobs))

    return step


def _all(verb: Callable[[Any], Any], model: Any) -> Callable[[Session], Any]:
    return lambda session: list(session.execute(verb(model)))


PARENT_ROWS = """
    INSERT INTO parent (id, status) VALUES (1, 'processing'), (2, 'completed'), (3, 'processing'), (4, 'failed'),
        (5, 'completed'), (6, 'pending');
    INSERT INTO child (id, a_id, b_id, status, waits_for_count) VALUES (10, 1, 3, 'waiting', 2),
        (11, 1, 2, 'waiting', 1), (12, 1, NULL, 'waiting', 1), (13, 2, 5, 'pending', 0), (14, 4, 3, 'waiting', 2),
        (15, 1, 3, 'waiting', 2)"""
HEIR_ROWS = f"{PARENT_ROWS}; UPDATE child SET status = 'cancelled', cancelled_for = 'a' WHERE id = 14"


def _dependent_operations(parent: Any, child: Any) -> dict[str, list[Step]]:
    def new(key: int, a: Any, b: Any = "NULL") -> str:
        return f"INSERT INTO child (id, a_id, b_id) VALUES ({key}, {a}, {b})"

    return {
        "complete 1": [_set("parent", "completed", 1)],
        "complete 3": [_set("parent", "completed", 3)],
        "complete 1, 3": [_set("parent", "completed", 3, 1)],
        "complete 1, then 3": [_set("parent", "completed", 1), _set("parent", "completed", 3)],
        "fail 1": [_set("parent", "failed", 1)],
        "cancel 6": [_by_key(cancel, parent, 6)],
        "retry 3": [_set("parent", "pending", 3)],
        "rescue": [_set("parent", "pending", 1)],
        "requeue 2": [_by_key(requeue, parent, 2)],
        "requeue 4": [_by_key(requeue, parent, 4)],
        "requeue 2, 5": [_set("parent", "pending", 2, 5)],
        "run parents": [_run(parent, complete)],
        "fenced": ["UPDATE parent SET status = 'completed' WHERE id = 1 AND status = 'lost'"],
        "rolled back": ["SAVEPOINT a", _set("parent", "completed", 1), "ROLLBACK TO a", _set("parent", "pending", 1)],
        "delete 6": ["DELETE FROM parent WHERE id = 6"],
        "insert (1, 3)": [new(20, 1, 3)],
        "insert (2, 3)": [new(21, 2, 3)],
        "insert (4)": [new(22, 4)],
        "insert (6, 2), twice": [new(23, 6, 2), new(24, 2, 6)],
        "insert with its parent": ["INSERT INTO parent (id) VALUES (7)", new(25, 7, 1)],
        "move 10 to (2, 3)": ["UPDATE child SET a_id = 2 WHERE id = 10"],
        "move 10 to (3, 3)": ["UPDATE child SET a_id = 3 WHERE id = 10"],
        "move 12 to (1, 2)": ["UPDATE child SET b_id = 2 WHERE id = 12"],
        "move 13 to (1, 5)": ["UPDATE child SET a_id = 1 WHERE id = 13"],
        "let 11 go": ["UPDATE child SET a_id = NULL WHERE id = 11"],
        "cancel 10": [_by_key(cancel, child, 10)],
        "requeue 14": [_by_key(requeue, child, 14)],
        "delete 10": ["DELETE FROM child WHERE id = 10"],
        "run children": [_run(child, complete)],
        "lose children": [_run(child, complete), ROLLBACK],
        "fail children": [_run(child, fail)],
        "reconcile": [_all(reconcile, child)],
    }


BATCH_ROWS = """
    INSERT INTO batch (id, status, waits_for_count, is_open) VALUES (1, 'waiting', 2, false), (2, 'waiting', 1, false),
        (3, 'pending', 0, false), (4, 'completed', 0, false), (5, 'waiting', 0, true);
    INSERT INTO member (id, batch_id, status) VALUES (1, 1, 'processing'), (2, 1, 'processing'), (3, 1, 'completed'),
        (4, 2, 'pending'), (5, 3, 'completed'), (6, 4, 'completed'), (7, 4, 'completed'), (8, NULL, 'pending')"""


def _batch_operations(batch: Any, member: Any) -> dict[str, list[Step]]:
    def add(key: int, to: int) -> str:
        return f"INSERT INTO member (id, batch_id) VALUES ({key}, {to})"

    def move(key: int, to: Any) -> str:
        return f"UPDATE member SET batch_id = {to} WHERE id = {key}"

    return {
        "complete 1": [_set("member", "completed", 1)],
        "complete 2": [_set("member", "completed", 2)],
        "fail 1": [_set("member", "failed", 1)],
        "complete 4, 2": [_set("member", "completed", 4, 2)],
        "complete 1, then 4": [_set("member", "completed", 1), _set("member", "completed", 4)],
        "cancel 2": [_by_key(cancel, member, 2)],
        "rescue": [_set("member", "pending", 1)],
        "retry 2": [_set("member", "pending", 2)],
        "requeue 3": [_by_key(requeue, member, 3)],
        "requeue 5": [_by_key(requeue, member, 5)],
        "requeue 6": [_by_key(requeue, member, 6)],
        "run members": [_run(member, complete)],
        "fail members": [_run(member, fail)],
        "fenced": ["UPDATE member SET status = 'completed' WHERE id = 1 AND status = 'lost'"],
        "add to 1": [add(20, 1)],
        "add to 2": [add(21, 2)],
        "add to 3": [add(22, 3)],
        "add to 4": [add(23, 4)],
        "add to 5": [add(24, 5)],
        "move 1 to 2": [move(1, 2)],
        "move 4 to 1": [move(4, 1)],
        "move 4 to 3": [move(4, 3)],
        "move 4 to 4": [move(4, 4)],
        "move 8 to 5": [move(8, 5)],
        "move 2 to none": [move(2, "NULL")],
        "delete 1": ["DELETE FROM member WHERE id = 1"],
        "delete 4": ["DELETE FROM member WHERE id = 4"],
        "new batch": ["INSERT INTO batch (id) VALUES (6)", add(25, 6)],
        "cancel batch 1": [_by_key(cancel, batch, 1)],
        "cancel batch 2": [_by_key(cancel, batch, 2)],
        "requeue batch 4": [_by_key(requeue, batch, 4)],
        "run batches": [_run(batch, complete)],
        "lose batches": [_run(batch, complete), ROLLBACK],
        "fail batches": [_run(batch, fail)],
        "close 5": ["UPDATE batch SET is_open = false WHERE id = 5"],
        "open 2": ["UPDATE batch SET is_open = true WHERE id = 2"],
        "reconcile": [_all(reconcile, batch)],
    }


GRAPHS: dict[str, tuple[Any, Any, str, dict[str, list[Step]]]] = {
    "dependent": (PARENT, CHILD, PARENT_ROWS, _dependent_operations(PARENT, CHILD)),
    "heir": (HEIR_PARENT, HEIR, HEIR_ROWS, _dependent_operations(HEIR_PARENT, HEIR)),
    "batch": (MEMBER, BATCH, BATCH_ROWS, _batch_operations(BATCH, MEMBER)),
    "strict": (STRICT_MEMBER, STRICT, BATCH_ROWS, _batch_operations(STRICT, STRICT_MEMBER)),
}
for _name, _options in (("selected", SELECTED), ("messages", MESSAGES)):
    _parent, _child = make_dependent(config=_options, parents=_options)
    _batch, _member = make_batch(config=_options, members=_options)
    GRAPHS[f"dependent {_name}"] = (_parent, _child, PARENT_ROWS, _dependent_operations(_parent, _child))
    GRAPHS[f"batch {_name}"] = (_member, _batch, BATCH_ROWS, _batch_operations(_batch, _member))
ALWAYS = {
    "dependent: A = complete 1, B = insert (1, 3)",
    "dependent: A = requeue 2, B = insert (2, 3)",
    "dependent: A = complete 1, B = complete 3",
    "dependent: A = complete 1, B = move 13 to (1, 5)",
    "batch: A = complete 1, B = complete 2",
    "batch: A = complete 4, 2, B = add to 2",
    "batch: A = add to 3, B = run batches",
    "batch: A = complete 1, B = cancel batch 1",
    "batch: A = requeue 6, B = requeue batch 4",
}
"""The pairs that are driven in each order by every run of the tests."""
LEAVING = {"move", "let", "delete"}
"""The first words of operations that take away what a job was cancelled for."""
DEADLOCKING = {"move 10 to (3, 3)", "requeue 14"}
"""Operations on a waiting job have locked it before they commit, and those on what it waits for lock it after their
keys. Where both have the same keys, the server refuses one of the two."""
ALLOWED = ("23514: ", "23505: ", "23503: ", "40001: ")
"""A batch that has begun takes no member; the other errors are those of keys, and of stricter isolation levels."""


def _clear(engine: sa.Engine, graph: str) -> None:
    awaited, waiting, rows, _ = GRAPHS[graph]
    tables = "; ".join(f"DELETE FROM {model.__table__.name}" for model in (awaited, waiting))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL session_replication_role = replica; {tables}; {rows}")
        if waiting.__queue__.strategy == "delete_returning":
            for model in (awaited, waiting):
                connection.exec_driver_sql(f"DELETE FROM sqlaqueue_message_{model.__table__.name}")
                connection.execute(reconcile(model))


@pytest.fixture(scope="module")
def driver(server: Server) -> Iterator[Driver]:
    with server.database() as database:
        engine = sa.create_engine(database.url(), pool_size=10)
        with driving(engine, A=None, B=None) as driver:
            yield driver
        engine.dispose()


@pytest.fixture(scope="module", params=GRAPHS)
def graph(request: pytest.FixtureRequest, driver: Driver) -> Iterator[str]:
    """The tables of a graph of jobs."""
    name, engine = request.param, driver.watcher.engine
    _, waiting, *_ = GRAPHS[name]
    waiting.metadata.create_all(engine)
    yield name
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def _orders(first: Sequence[Any], second: Sequence[Any], *, every: bool) -> list[str]:
    found = list(interleavings(len(first), len(second)))
    return found if every else found[1:-1]


def _drive_pairs(driver: Driver, graph: str, *, applying: bool, part: Callable[[str], bool]) -> list[str]:
    _, waiting, _, operations = GRAPHS[graph]
    end = [APPLY, COMMIT] if applying else [COMMIT]
    wrong = []
    for first, second in itertools.combinations_with_replacement(operations, 2):
        programs = {"A": [*operations[first], *end], "B": [*operations[second], *end]}
        for order in _orders(*programs.values(), every=False):
            what = f"{graph}: A = {first}, B = {second}, {order}"
            if not part(what):
                continue
            _clear(driver.watcher.engine, graph)
            errors = driver.drive(programs, order)
            allowed = (*ALLOWED, "40P01: ") if DEADLOCKING & {first, second} else ALLOWED
            found = [error for error in errors if not error.startswith(allowed)]
            words = {*first.split(), *second.split()}
            options = {"returns": not LEAVING & words, "grows": bool({"requeue", "move"} & words)}
            found += faults(driver.watcher, waiting, **options)
            wrong += [f"{what}: {'; '.join(found)}"] if found else []
    return wrong


def _is_in_sample(what: str) -> bool:
    return what.rpartition(", ")[0] in ALWAYS or zlib.crc32(what.encode()) % 300 == 0


@pytest.mark.few(4)
def test_pairs(driver: Driver, graph: str) -> None:
    """A part of them in each run; which one is always the same."""
    wrong = _drive_pairs(driver, graph, applying=True, part=_is_in_sample)
    assert not wrong, "\n".join(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("applying", [False, True])
@pytest.mark.parametrize("number", range(8))
def test_all_pairs(driver: Driver, graph: str, number: int, *, applying: bool) -> None:
    wrong = _drive_pairs(driver, graph, applying=applying, part=lambda what: zlib.crc32(what.encode()) % 8 == number)
    assert not wrong, "\n".join(wrong)
