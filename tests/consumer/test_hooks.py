"""Sessions with event hooks that record each statement, as applications use for logs and traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import ORMExecuteState, Session

from sqlaqueue import Cancel, Fail, Retry, Snooze
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

    maker = {"sync": "class_", "async": "sync_session_class"}[bench.api]
    server = bench.consumer(handle, session={maker: writing([*HOOKS.values()], written, refused)})
    assert server.drain() == 7
    assert refused == []
    assert sorted(server.told("completed", "failed", "cancelled")) == [1, 2, 4, 6]
    assert any("sqlaqueue_consumer" in text for text in written)
    assert any("DELETE FROM sqlaqueue_control" in text for text in written)
