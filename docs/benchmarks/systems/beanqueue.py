"""BeanQueue: a decorated function, its arguments in a task that is a SQLAlchemy model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import bq
from bq import models
from bq.db.base import Base
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from docs.benchmarks.systems.protocol import Adapter, Meter, main, version_of

# It finds its functions by scanning packages, so the handler needs a global meter.
PATH = "docs.benchmarks.systems.beanqueue"
meters: list[Meter] = []
app = bq.BeanQueue()


@app.processor(channel="default")
async def handle(**payload: Any) -> None:
    """Handle a task."""
    await meters[0].handle_async(payload)


class Bean(Adapter):
    """Runs its worker, which executes one task at a time unless tuned."""

    def engine(self) -> Any:
        """Return an engine with the driver that it uses."""
        return create_async_engine(self.url.replace("postgresql:", "postgresql+psycopg:"))

    async def prepare(self) -> Any:
        engine = self.engine()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await engine.dispose()
        remaining = (
            "SELECT 1 FROM bq_tasks WHERE state IN ('PENDING', 'PROCESSING') "
            "AND (scheduled_at IS NULL OR scheduled_at <= now())"
        )
        statements = {
            "finish": "UPDATE bq_tasks SET state = 'DONE'",
            "lock": "SELECT 1 FROM bq_tasks WHERE state = 'PENDING' ORDER BY created_at LIMIT 1 FOR UPDATE",
        }
        return remaining, version_of("beanqueue", "sqlalchemy", "psycopg"), statements

    async def open(self) -> None:
        self._engine = self.engine()

    async def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        # BeanQueue has no priorities.
        when = {"scheduled_at": datetime.now(UTC) + timedelta(seconds=request["delay"])} if "delay" in request else {}
        place = {"channel": "default", "module": PATH, "func_name": "handle", **when}
        async with AsyncSession(self._engine) as session:
            session.add_all(models.Task(kwargs=each, **place) for each in jobs)
            await session.commit()

    async def work(self, meter: Meter) -> None:
        meters.append(meter)
        tuned = {"BATCH_SIZE": 1000} if self.tuned else {}
        app.config = bq.Config(PROCESSOR_PACKAGES=[PATH], DATABASE_URL=self.url, **tuned)
        logging.disable(logging.WARNING)
        meter.wait_for_go()
        await app.process_tasks(channels=("default",))


if __name__ == "__main__":
    # Tasks refer to their function by its module, which must not be __main__.
    from docs.benchmarks.systems.beanqueue import Bean as Imported

    main(Imported)
