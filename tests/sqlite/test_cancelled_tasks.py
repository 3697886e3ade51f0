"""Tasks that are cancelled in the middle of a statement leave no lock behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import sqlaqueue.sqlite
from sqlaqueue import claim
from tests.sqlite.features import Base, Email

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.once


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_cancelled_claim_releases_the_write_lock(tmp_path: Path) -> None:
    """Also between the UPDATE and the read of what it returns, when the traceback has the cursor."""
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}")
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    sqlaqueue.sqlite.prepare(async_engine)
    sqlaqueue.sqlite.prepare(engine, busy_timeout=0.1)
    Base.metadata.create_all(engine)

    async def claim_for_ever() -> None:
        async with AsyncSession(async_engine) as session:
            # aiosqlite leaves a connection open whose task is cancelled while it is made.
            await session.connection()
            connected.set()
            while True:
                session.add(Email())
                await session.flush()
                await session.scalars(claim(Email, 1))
                await session.rollback()

    kept: list[BaseException] = []
    for number in range(60):
        connected = asyncio.Event()
        task = asyncio.create_task(claim_for_ever())
        await connected.wait()
        await asyncio.sleep(0.001 + number * 0.0003)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as cancelled:
            kept.append(cancelled)
        with engine.begin() as connection:
            connection.execute(sa.text("BEGIN IMMEDIATE"))
    assert len(kept) == 60
    await async_engine.dispose()
    engine.dispose()
