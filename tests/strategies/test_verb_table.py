"""A table of the effects of every verb under every strategy, on Session and AsyncSession."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from sqlaqueue import (
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.testing import QueueUnderTest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.servers import Server

STRATEGIES: dict[str, tuple[str, dict[str, str | None]]] = {
    "update_status": ("update_status", {}),
    "batch_select": ("batch_select", {}),
    "delete_returning": ("delete_returning", {}),
    "own_message": ("delete_returning", {"status": None}),
}


class Left(NamedTuple):
    """What a verb leaves behind of a job, as everybody sees it."""

    state: str | None
    attempts: int | None
    changed: bool = True
    """Whether its key came back."""


PENDING = Left("pending", 0)
UNTOUCHED = Left("pending", 0, changed=False)
COUNTED = Left("pending", 1)
RUNNING = Left("processing", 1)
GONE = Left(None, None)

TABLE: dict[str, dict[str, Left]] = {
    verb: dict(zip(STRATEGIES, cells, strict=True))
    for verb, cells in {
        # verb: update_status, batch_select, delete_returning, rows that are their own message
        "claim": (RUNNING, PENDING, PENDING, PENDING),
        "claim a select": (RUNNING, PENDING, PENDING, PENDING),
        "complete": (Left("completed", 1), Left("completed", 1), Left("completed", 1), GONE),
        "retry": (COUNTED, COUNTED, COUNTED, COUNTED),
        "retry later": (COUNTED, COUNTED, COUNTED, COUNTED),
        "fail": (Left("failed", 1), Left("failed", 1), Left("failed", 1), Left("failed", None)),
        "release": (PENDING, PENDING, PENDING, PENDING),
        "release later": (PENDING, PENDING, PENDING, PENDING),
        "extend": (RUNNING, PENDING, PENDING, PENDING),
        "cancel": (Left("cancelled", 0),) * 3 + (Left("cancelled", None),),
        "cancel a select": (Left("cancelled", 0),) * 3 + (Left("cancelled", None),),
        "requeue": (PENDING, PENDING, PENDING, PENDING),
        "rescue": (COUNTED, UNTOUCHED, UNTOUCHED, UNTOUCHED),
        "purge": (GONE, GONE, GONE, GONE),
        "reconcile": (UNTOUCHED, UNTOUCHED, PENDING, UNTOUCHED),
    }.items()
}

CELLS = [(verb, strategy) for verb, cells in TABLE.items() for strategy in cells]


class Hand:
    """A Session or an AsyncSession, to be awaited either way."""

    def __init__(self, session: Session | AsyncSession) -> None:
        self._session = session

    async def scalars(self, statement: Any) -> list[Any]:
        if isinstance(self._session, AsyncSession):
            return list((await self._session.execute(statement)).scalars().all())
        return list(self._session.execute(statement).scalars().all())

    async def commit(self) -> None:
        if isinstance(self._session, AsyncSession):
            await self._session.commit()
        else:
            self._session.commit()


Action = "Callable[[QueueUnderTest, Hand], Awaitable[list[Any]]]"


def of_run(verb: Callable[[Any], Any]) -> Action:
    """Claim the job and end or extend its run."""

    async def act(queue: QueueUnderTest, hand: Hand) -> list[Any]:
        jobs = await hand.scalars(claim(queue.Job, 5))
        return await hand.scalars(verb(jobs))

    return act


def of_queue(statement: Callable[[QueueUnderTest], Any], *, after: Any = None) -> Action:
    """Do something with a job that waits, or whose run ended by ``after``."""

    async def act(queue: QueueUnderTest, hand: Hand) -> list[Any]:
        if after is not None:
            await hand.scalars(after(await hand.scalars(claim(queue.Job, 5))))
            await hand.commit()
        return await hand.scalars(statement(queue))

    return act


def of_claim(statement: Callable[[QueueUnderTest], Any]) -> Action:
    async def act(queue: QueueUnderTest, hand: Hand) -> list[Any]:
        return [job.number for job in await hand.scalars(statement(queue))]

    return act


async def rescue_expired(queue: QueueUnderTest, hand: Hand) -> list[Any]:
    if queue.leased:
        await hand.scalars(extend(await hand.scalars(claim(queue.Job, 5)), lease=0))
        await hand.commit()
    return await hand.scalars(rescue(queue.Job))


async def reconcile_lost(queue: QueueUnderTest, hand: Hand) -> list[Any]:
    if queue.keeps_rows and not queue.leased:
        await hand.scalars(claim(queue.Job, 5))
        await hand.commit()
    return await hand.scalars(reconcile(queue.Job))


ACTIONS: dict[str, Action] = {
    "claim": of_claim(lambda queue: claim(queue.Job, 5)),
    "claim a select": of_claim(lambda queue: claim(sa.select(queue.Job).where(queue.Job.payload == "x"), 5)),
    "complete": of_run(complete),
    "retry": of_run(lambda jobs: retry(jobs, error=ValueError("no"))),
    "retry later": of_run(lambda jobs: retry(jobs, delay=60)),
    "fail": of_run(lambda jobs: fail(jobs, error="no")),
    "release": of_run(release),
    "release later": of_run(lambda jobs: release(jobs, delay=60)),
    "extend": of_run(lambda jobs: extend(jobs, lease=60)),
    "cancel": of_queue(lambda queue: cancel(queue.Job)),
    "cancel a select": of_queue(lambda queue: cancel(queue.only(0))),
    "requeue": of_queue(lambda queue: requeue(queue.Job), after=fail),
    "rescue": rescue_expired,
    "purge": of_queue(lambda queue: purge(queue.Job, older_than=0), after=fail),
    "reconcile": reconcile_lost,
}
HELD_OPEN = {"claim", "claim a select", "extend"}
"""The verbs after which a strategy without leases must not commit yet."""


@pytest.fixture(scope="module")
def database_urls(server: Server) -> Iterator[dict[str, str]]:
    with server.database() as database:
        yield {"psycopg": database.url("psycopg"), "asyncpg": database.url("asyncpg")}


@pytest.fixture(scope="module", params=STRATEGIES)
def tables(database_urls: dict[str, str], request: pytest.FixtureRequest) -> Iterator[tuple[str, QueueUnderTest]]:
    engine = sa.create_engine(database_urls["psycopg"])
    strategy, columns = STRATEGIES[request.param]
    with QueueUnderTest(engine, strategy, columns) as queue:
        yield request.param, queue
    engine.dispose()


@asynccontextmanager
async def open_hand(kind: str, urls: dict[str, str]) -> AsyncIterator[Hand]:
    if kind == "Session":
        engine = sa.create_engine(urls["psycopg"], poolclass=NullPool)
        with Session(engine) as session:
            yield Hand(session)
        return
    async_engine = create_async_engine(urls[kind.removeprefix("AsyncSession-")], poolclass=NullPool)
    async with AsyncSession(async_engine) as async_session:
        yield Hand(async_session)


@pytest.mark.parametrize("kind", ["Session", "AsyncSession-psycopg", "AsyncSession-asyncpg"])
@pytest.mark.parametrize("verb", TABLE)
async def test_verb(tables: tuple[str, QueueUnderTest], database_urls: dict[str, str], verb: str, kind: str) -> None:
    strategy, queue = tables
    expected = TABLE[verb][strategy]
    queue.clear()
    queue.enqueue(1, payload="x")
    async with open_hand(kind, database_urls) as hand:
        keys = await ACTIONS[verb](queue, hand)
        if queue.leased or verb not in HELD_OPEN:
            await hand.commit()
        assert keys == ([queue.key(0)] if expected.changed else [])
        assert (queue.state(0), queue.attempts(0)) == expected[:2]
