"""chancy: a decorated function by its import path, arguments as JSON."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from chancy import Chancy, Queue, Worker, job

from docs.benchmarks.systems.protocol import Adapter, Meter, main, version_of

# It imports the function of a job by its path, so the handler needs a global meter.
meters: list[Meter] = []


@job()
async def handle(**payload: Any) -> None:
    """Handle a job."""
    await meters[0].handle_async(payload)


class InChancy(Adapter):
    """Runs its async executor; the default one starts processes, which cannot use the meter."""

    def app(self) -> Chancy:
        """Return the application."""
        return Chancy(self.url, log=logging.getLogger("chancy"))

    async def prepare(self) -> Any:
        async with self.app() as app:
            await app.migrate()
            how: dict[str, Any] = (
                {"concurrency": 1000, "eager_polling": True, "polling_interval": 1} if self.tuned else {}
            )
            await app.declare(Queue("default", executor=Chancy.Executor.Async, **how), upsert=True)
        remaining = (
            "SELECT 1 FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying') AND scheduled_at <= now()"
        )
        statements = {
            "finish": "UPDATE chancy_jobs SET state = 'succeeded', completed_at = now()",
            "lock": "SELECT 1 FROM chancy_jobs WHERE state = 'pending' ORDER BY priority DESC, id LIMIT 1 FOR UPDATE",
        }
        return remaining, version_of("chancy", "psycopg"), statements

    async def open(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._app = await self._stack.enter_async_context(self.app())

    async def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        # Higher priorities come first.
        plain = handle.job.with_priority(-request.get("priority", 0))
        plain = plain.with_scheduled_at(datetime.now(UTC) + timedelta(seconds=request.get("delay", 0)))
        if request["way"] == "one":
            for each in jobs:
                await self._app.push(plain.with_kwargs(**each))
        else:
            async for _ in self._app.push_many([plain.with_kwargs(**each) for each in jobs]):
                pass

    async def work(self, meter: Meter) -> None:
        meters.append(meter)
        async with self.app() as app:
            meter.wait_for_go()
            async with Worker(app) as worker:
                await worker.wait_for_shutdown()


if __name__ == "__main__":
    # Jobs refer to their function by its path, which must not be in __main__.
    from docs.benchmarks.systems.chancy import InChancy as Imported

    main(Imported)
