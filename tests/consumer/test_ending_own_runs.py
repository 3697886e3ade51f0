"""Handlers that end their own runs, their batch's transaction past the session, or change the key of their job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, complete, extend, fail, release, retry
from sqlaqueue.consumer.sessions import ends_transaction
from tests.consumer.bench import Bench

pytestmark = pytest.mark.once


def by_connection(session: Session) -> None:
    session.connection().commit()


def by_statement(session: Session) -> None:
    session.execute(sa.text("-- done\nCOMMIT"))


def by_driver(session: Session) -> None:
    session.connection().connection.dbapi_connection.commit()


def by_cursor(session: Session) -> None:
    session.connection().connection.cursor().execute("COMMIT")


@pytest.mark.each_value
@pytest.mark.parametrize("end", [by_connection, by_statement, by_driver, by_cursor])
def test_a_commit_past_the_session(supply: Any, api: str, end: Callable[[Session], None]) -> None:
    """Its job fails, and the other jobs of the batch complete."""
    for strategy in ("delete_returning", "batch_select", "own_message"):
        bench = supply.take(strategy, api)
        good = bench.enqueue(2)
        [bad] = bench.enqueue(1, max_attempts=2)
        good += bench.enqueue(2)

        async def work(io: Any, job: Any, bench: Bench = bench, bad: int = bad) -> None:
            await io.execute(bench.effect(job.id))
            if job.id == bad:
                await io.run(end)

        server = bench.consumer(work, batch_size=10)
        server.drain()
        assert server.told("failed") == [bad]
        assert bench.states() == ({"completed": 4, "failed": 1} if bench.has_status else {"failed": 1})
        if bench.has_status:
            assert bench.attempts() == dict.fromkeys(good, 1) | {bad: 2}
            assert "HandlerMisuseError" in bench.row(bad).last_error
            assert "begin_nested" in bench.row(bad).last_error
        effects = bench.effects()
        refused = end in {by_connection, by_statement}
        assert effects.pop(bad, 0) == (0 if refused else 2)
        if strategy == "batch_select" and not refused:
            # What the driver commits nothing tells from a rollback: those that had ended before run again.
            assert effects.keys() == set(good)
        else:
            assert effects == dict.fromkeys(good, 1)
        bench.assert_tidy()


REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN IF EXISTS (SELECT FROM effect) THEN {refusal}; END IF; RETURN OLD; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON {table} FOR EACH ROW WHEN (OLD.id = 1) EXECUTE FUNCTION refuse()
"""


@pytest.mark.parametrize("refusal", ["RAISE EXCEPTION 'no'", "RETURN NULL"])
@pytest.mark.parametrize("strategy", ["delete_returning", "own_message"])
def test_a_refused_end_beside_a_commit_past_the_session(supply: Any, api: str, strategy: str, refusal: str) -> None:
    """Its job waits, and no job of the batch vanishes: the commit has deleted all their rows or messages."""
    bench = supply.take(strategy, api)
    table = "job" if strategy == "own_message" else "sqlaqueue_message_job"
    bench.execute(REFUSE.format(refusal=refusal, table=table))
    refused, *good = bench.enqueue(2)
    [bad] = bench.enqueue(1, max_attempts=1)
    good += bench.enqueue(2)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            await io.run(by_driver)

    server = bench.consumer(work, batch_size=10)
    try:
        server.drain()
    finally:
        bench.execute("DROP FUNCTION refuse CASCADE")
    assert server.told("failed") == [bad]
    assert sorted(server.told("completed")) == good
    assert bench.states()["pending"] == 1
    assert bench.row(refused).id == refused


def test_an_outage_after_a_commit_past_the_session(supply: Any, api: str) -> None:
    """No job vanishes: only the Consumer knows the rows that the commit has deleted, so it tries again."""
    bench = supply.take("own_message", api)
    good = bench.enqueue(2)
    [bad] = bench.enqueue(1, max_attempts=1)
    good += bench.enqueue(2)
    outage = list[int]()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            await io.run(by_driver)
            outage.extend([1, 2, 3])

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if outage and "INSERT INTO job " in statement:
            outage.pop()
            raise sa.exc.OperationalError(statement, {}, OSError("no route to host"), connection_invalidated=True)

    server = bench.consumer(work, batch_size=10)
    sa.event.listen(server.sync_engine, "before_cursor_execute", refuse)
    server.drain()
    assert not outage
    assert server.told("failed") == [bad]
    assert bench.states() == {"failed": 1}
    assert bench.effects() == dict.fromkeys(good, 1) | {bad: 1}


def set_status(session: Session, job: Any) -> None:
    job.status = "completed"


def change_key(session: Session, job: Any) -> None:
    job.id += 100


def change_key_by_sql(session: Session, job: Any) -> None:
    session.execute(sa.text("UPDATE job SET id = id + 100 WHERE id = :id"), {"id": job.id})


def set_status_by_sql(session: Session, job: Any) -> None:
    session.execute(sa.text("UPDATE job SET status = 'completed' WHERE id = :id"), {"id": job.id})


def delete_by_sql(session: Session, job: Any) -> None:
    session.execute(sa.text("DELETE FROM job WHERE id = :id"), {"id": job.id})


def use(verb: Any) -> Callable[[Session, Any], None]:
    def on_its_job(session: Session, job: Any) -> None:
        session.execute(verb(job))

    on_its_job.__name__ = verb.__name__
    return on_its_job


ROWS = [set_status, change_key, change_key_by_sql, set_status_by_sql, delete_by_sql]
VERBS = [use(verb) for verb in (complete, fail, retry, release, cancel)]


def test_a_handler_must_not_end_its_own_run(bench: Bench) -> None:
    """In any way: the error names the fix, its writes are undone, and the other jobs complete."""
    ways = [*ROWS, *VERBS]
    good = bench.enqueue(1)
    bad = dict(zip(bench.enqueue(len(ways), max_attempts=1), ways, strict=True))
    good += bench.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        key = job.id
        await io.execute(bench.effect(key))
        if key in bad:
            await io.run(lambda session: bad[key](session, job))

    server = bench.consumer(work)
    server.drain()
    rows = bench.rows()
    assert {bad[key].__name__: rows[key].status for key in bad} == {way.__name__: "failed" for way in ways}
    for key in bad:
        assert rows[key].last_error.startswith(("HandlerMisuseError", "RowsChanged")), rows[key].last_error
        assert rows[key].attempts == 1
    assert bench.effects() == dict.fromkeys(good, 1)
    assert sorted(server.told("completed")) == good
    assert server.told("lease_lost") == []
    bench.assert_tidy()


def test_a_handler_may_extend_its_lease(leased: Bench) -> None:
    leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(extend(job))

    leased.consumer(work).drain()
    assert leased.states() == {"completed": 1}


@pytest.mark.parametrize(
    "text", ["commit", " COMMIT;", "/* a */ -- b\n rollback", "END", "abort", "PREPARE TRANSACTION 'x'"]
)
def test_statements_that_end_a_transaction(text: str) -> None:
    assert ends_transaction(text)


@pytest.mark.parametrize(
    "text",
    [
        "ROLLBACK TO SAVEPOINT x",
        "rollback work to x",
        "SELECT 'commit'",
        "committed",
        "PREPARE x AS SELECT 1",
        "ending",
    ],
)
def test_statements_that_do_not(text: str) -> None:
    assert not ends_transaction(text)
