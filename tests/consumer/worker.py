"""A worker process: ``python -m tests.consumer.worker ORDER``, see :class:`tests.consumer.bench.Worker`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from tests.consumer import handlers
from tests.consumer.hands import for_async, for_sync
from tests.consumer.models import models

EVENTS = ("claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost")


def main() -> None:
    order = json.loads(sys.argv[1])
    model = models(order["strategy"]).job
    handler = getattr(handlers, order["handler"])
    options = order["options"]
    pool = options.get("concurrency", 1) + 1
    threading.Thread(target=handlers.listen, daemon=True).start()

    def prepare(consumer: Any) -> None:
        for event in EVENTS:
            consumer.on(event, lambda event: handlers.say(f"{event.name} {event.key[0]}"))
        handlers.say("ready")

    if order["colour"] == "sync":
        engine = sa.create_engine(order["url"], pool_size=pool)
        consumer = Consumer(model, for_sync(handler), sessionmaker(engine), **options)
        prepare(consumer)
        consumer.run()
        handlers.say("returned")
        engine.dispose()
        return

    async def serve() -> None:
        async_engine = create_async_engine(order["url"], pool_size=pool)
        async_consumer = AsyncConsumer(model, for_async(handler), async_sessionmaker(async_engine), **options)
        prepare(async_consumer)
        await async_consumer.run()
        handlers.say("returned")
        await async_engine.dispose()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
