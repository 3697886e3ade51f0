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

LOOK_FOR_STALLED_JOBS = "* * * * * */5"
"""Every five seconds; the last field is seconds."""

HEARTBEATS = 3
"""How many heartbeats fit into the time after which a worker counts as stalled, as by default."""


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
        if "lease" in options:
            self._retry_stalled_jobs(options["lease"])

    def _retry_stalled_jobs(self, lease: float) -> None:
        """Add the periodic task of its guide, for workers that have sent no heartbeat for ``lease`` seconds."""

        @self.app.periodic(cron=LOOK_FOR_STALLED_JOBS)
        @self.app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
        async def retry_stalled_jobs(context: Any, timestamp: int) -> None:
            manager = self.app.job_manager
            for job in await manager.get_stalled_jobs(seconds_since_heartbeat=lease):
                await manager.retry_job(job)

    def prepare(self) -> Any:
        with psycopg.connect(self.url) as connection:
            connection.execute(procrastinate.schema.SchemaManager.get_schema().encode())
        remaining = (
            "SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing') AND task_name = 'handle' "
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

    async def reopen(self) -> None:
        # Its pool replaces broken connections one by one, which would delay the producer.
        await self.app.close_async()
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
        tuned: dict[str, Any] = {"concurrency": 10, "delete_jobs": "always"} if self.tuned else {}
        if "concurrency" in self.options:
            tuned["concurrency"] = self.options["concurrency"]
        if "lease" in self.options:
            lease = self.options["lease"]
            tuned |= {"update_heartbeat_interval": lease / HEARTBEATS, "stalled_worker_timeout": lease}
        async with self.app.open_async():
            meter.wait_for_go()
            await self.app.run_worker_async(**tuned)


if __name__ == "__main__":
    main(Procrastinate)
