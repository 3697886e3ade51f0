"""procrastinate: a function is the task, its arguments are JSON.

Of its jobs with the same ``lock`` one runs at once, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import procrastinate
import psycopg

from docs.benchmarks.systems.protocol import Adapter, Meter, main, version_of


class Procrastinate(Adapter):
    """Runs its async worker, the recommended one."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=self.url))
        self.meter: Meter | None = None

        @self.app.task(name="handle")
        async def handle(**payload: Any) -> None:
            assert self.meter is not None
            await self.meter.handle_async(payload)

        self.task = handle

    def prepare(self) -> Any:
        with psycopg.connect(self.url) as connection:
            connection.execute(procrastinate.schema.SchemaManager.get_schema().encode())
        remaining = (
            "SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing') "
            "AND (scheduled_at IS NULL OR scheduled_at <= now())"
        )
        statements = {
            "finish": "UPDATE procrastinate_jobs SET status = 'succeeded'",
            "lock": "SELECT 1 FROM procrastinate_jobs WHERE status = 'todo' "
            "ORDER BY priority DESC, id LIMIT 1 FOR UPDATE",
        }
        return remaining, version_of("procrastinate", "psycopg"), statements

    async def open(self) -> None:
        await self.app.open_async()

    async def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        when = {}
        if "delay" in request:
            when["schedule_at"] = datetime.now(UTC) + timedelta(seconds=request["delay"])
        if self.options.get("flow"):
            # Its own call for many jobs has one lock for all of them.
            locked = [self.task.configure(lock=str(job["account"])).make_new_job(**job) for job in jobs]
            await self.app.job_manager.batch_defer_jobs_async(jobs=locked)
            return
        # Higher priorities come first.
        deferrer = self.task.configure(priority=-request.get("priority", 0), **when)
        if request["way"] == "one":
            for job in jobs:
                await deferrer.defer_async(**job)
        else:
            await deferrer.batch_defer_async(*jobs)

    async def work(self, meter: Meter) -> None:
        self.meter = meter
        tuned = {"concurrency": 10, "delete_jobs": "always"} if self.tuned else {}
        if "concurrency" in self.options:
            tuned["concurrency"] = self.options["concurrency"]
        async with self.app.open_async():
            meter.wait_for_go()
            await self.app.run_worker_async(**tuned)


if __name__ == "__main__":
    main(Procrastinate)
