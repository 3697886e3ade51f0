"""Sessions with event hooks that record each statement, as applications use for logs and traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria

from sqlaqueue import (
    Cancel,
    Fail,
    Retry,
    Snooze,
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    release,
    requeue,
    retry,
)
from tests.consumer.bench import Bench

_make_dialect: Any = postgresql.dialect
DIALECT = _make_dialect()

HOOKS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "text for PostgreSQL": lambda statement: str(statement.compile(dialect=DIALECT)),
    "text with its values": lambda statement: str(
        statement.compile(dialect=DIALECT, compile_kwargs={"literal_binds": True})
    ),
}


def writing(hooks: list[Callable[[Any], str]], written: list[str], refused: list[Exception]) -> type[Session]:
    """Return a class of sessions that write down what they execute."""

    class Writing(Session):
        pass

    @sa.event.listens_for(Writing, "do_orm_execute")
    def _write(state: ORMExecuteState) -> None:
        try:
            written.extend(hook(state.statement) for hook in hooks)
        except Exception as error:  # noqa: BLE001 - the Consumer would retry for ever; the test checks it
            refused.append(error)

    return Writing


@pytest.mark.parametrize("strategy", ["update_status", "delete_returning", "batch_select", "own_message"])
def test_a_consumer_works_with_sessions_that_record_statements(bench: Bench) -> None:
    bench.enqueue(6)
    written: list[str] = []
    refused: list[Exception] = []
    ends: dict[int, BaseException] = {2: Fail("no"), 3: Snooze(60), 4: Cancel("off"), 5: Retry(60), 6: ValueError("no")}

    async def handle(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id in ends:
            raise ends[job.id]

    server = bench.consumer(handle, session={"class_": writing([*HOOKS.values()], written, refused)})
    assert server.drain() == 7
    assert refused == []
    assert sorted(server.told("completed", "failed", "cancelled")) == [1, 2, 4, 6]
    assert any("sqlaqueue_consumer" in text for text in written)
    assert any("DELETE FROM sqlaqueue_control" in text for text in written)


def hiding(model: Any, *, aliases: bool) -> type[Session]:
    """Return a class of sessions that add a condition to every statement, as a soft delete does."""

    class Hiding(Session):
        pass

    @sa.event.listens_for(Hiding, "do_orm_execute")
    def _hide(state: ORMExecuteState) -> None:
        visible = model.payload.is_distinct_from("hidden")
        state.statement = state.statement.options(with_loader_criteria(model, visible, include_aliases=aliases))

    return Hiding


@pytest.mark.parametrize("aliases", [False, True])
def test_a_consumer_settles_jobs_that_a_condition_on_all_statements_hides(bench: Bench, *, aliases: bool) -> None:
    """A handler that hides its own job has not lost it."""
    keys, calls = bench.enqueue(6, max_attempts=2), Counter[int]()
    ends: dict[int, BaseException] = {keys[1]: ValueError("once"), keys[2]: Fail("no"), keys[3]: Cancel("off")}

    async def handle(io: Any, job: Any) -> None:
        calls[job.id] += 1
        job.payload = "hidden"
        await io.flush()
        if job.id in ends and calls[job.id] == 1:
            raise ends[job.id]

    server = bench.consumer(handle, session={"class_": hiding(bench.Job, aliases=aliases)}, batch_size=3)
    server.drain()
    assert bench.states() == {"completed": 4, "failed": 1, "cancelled": 1}
    assert calls == {key: 2 if key == keys[1] else 1 for key in keys}
    assert not server.told("lease_lost")
    bench.assert_tidy()


SETTLING: dict[str, Callable[[Any], Any]] = {
    "complete": complete,
    "fail": fail,
    "retry": retry,
    "release": release,
    "extend": extend,
}


@pytest.mark.parametrize("aliases", [False, True])
def test_verbs_of_claimed_jobs_find_those_that_a_condition_on_all_statements_hides(
    supply: Any, strategy: str, *, aliases: bool
) -> None:
    bench = supply.take(strategy, "sync")
    for name, verb in SETTLING.items():
        if name == "extend" and bench.held:
            continue
        with hiding(bench.Job, aliases=aliases)(bench.engine) as session:
            session.add_all([bench.Job() for _ in range(2)])
            session.flush()
            jobs = session.scalars(claim(bench.Job, 2)).all()
            assert len(jobs) == 2, name
            for job in jobs:
                job.payload = "hidden"
            assert len(session.scalars(verb(jobs)).all()) == 2, name
            session.rollback()


@pytest.mark.parametrize("aliases", [False, True])
def test_statements_that_choose_jobs_obey_a_condition_that_includes_aliases(
    supply: Any, strategy: str, *, aliases: bool
) -> None:
    bench = supply.take(strategy, "sync")
    Job = bench.Job  # noqa: N806 - a class
    chooses: dict[str, Any] = {
        "pending": [claim(Job, 5), cancel(sa.select(Job))],
        "failed": [requeue(sa.select(Job)), purge(Job)],
    }
    for state, verbs in chooses.items():
        for verb in verbs:
            bench.clear()
            [hidden, shown] = [*bench.enqueue(1, payload="hidden", status=state), *bench.enqueue(1, status=state)]
            with hiding(Job, aliases=aliases)(bench.engine) as session:
                changed = {getattr(each, "id", each) for each in session.scalars(verb).all()}
                # SQLAlchemy adds it to an UPDATE or DELETE of the class, even without aliases.
                assert changed - {hidden} == {shown}, verb
                assert not (aliases and hidden in changed), verb
                session.rollback()
