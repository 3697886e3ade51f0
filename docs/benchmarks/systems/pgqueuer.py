"""pgqueuer: an entry point by name, a payload of bytes.

Its limit is one of an entry point. So for a limit of each key there is an entry point for each, all known beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.queries import Queries

from docs.benchmarks.systems.protocol import Adapter, Meter, main, version_of


class Pgqueuer(Adapter):
    """Runs it with asyncpg, and with uvloop if tuned."""

    @property
    def loop_factory(self) -> Any:
        return uvloop.new_event_loop if self.tuned else None

    async def prepare(self) -> Any:
        connection = await asyncpg.connect(self.url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()
        # It moves finished jobs to a log table, so there is no statement to finish jobs.
        age = "extract(epoch FROM now() - min(execute_after))"
        statements = {
            "due": f"SELECT count(*), {age} FROM pgqueuer WHERE execute_after <= now()",
            "lock": "SELECT 1 FROM pgqueuer WHERE status = 'queued' ORDER BY priority DESC, id LIMIT 1 FOR UPDATE",
        }
        return "SELECT 1 FROM pgqueuer WHERE execute_after <= now()", version_of("pgqueuer", "asyncpg"), statements

    async def open(self) -> None:
        self._queries = Queries(AsyncpgDriver(await asyncpg.connect(self.url)))

    async def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        encoded: list[bytes | None] = [json.dumps(job).encode() for job in jobs]
        # Higher priorities come first.
        priority = -request.get("priority", 0)
        after = timedelta(seconds=request["delay"]) if "delay" in request else None
        if request["way"] == "one":
            for one in encoded:
                await self._queries.enqueue("handle", one, priority, after)
        else:
            number = len(jobs)
            names = [self._name(job["account"]) for job in jobs]
            await self._queries.enqueue(names, encoded, [priority] * number, [after] * number)

    @property
    def _flow(self) -> Mapping[str, Any]:
        return self.options.get("flow") or {"most": 0, "per_key": False}

    def _name(self, key: int) -> str:
        return f"handle {key}" if self._flow["per_key"] else "handle"

    async def work(self, meter: Meter) -> None:
        if self.tuned:
            pool = await asyncpg.create_pool(self.url, min_size=4, max_size=4)
            queuer = PgQueuer(AsyncpgPoolDriver(pool))
        else:
            queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.url)))

        async def handle(job: Any) -> None:
            await meter.handle_async(json.loads(job.payload))

        for name in {self._name(key) for key in range(self.options.get("keys", 1))}:
            queuer.entrypoint(name, concurrency_limit=self._flow["most"])(handle)

        meter.wait_for_go()
        arguments: dict[str, Any] = {"batch_size": 1000} if self.tuned else {}
        arguments |= self.options.get("run", {})
        if "lease" in self.options:
            arguments["heartbeat_timeout"] = timedelta(seconds=self.options["lease"])
        await queuer.run(**arguments)


if __name__ == "__main__":
    main(Pgqueuer)
