"""What a worker process does, see :class:`tests.consumer.processes.Worker`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import pace
from sqlaqueue.exc import HandlerNotStopped
from tests.consumer import handlers
from tests.consumer.handler_io import for_async, for_sync
from tests.consumer.models import models, prepared

EVENTS = ("claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost")


def live(order: Any, orders: Connection, words: Connection) -> None:
    """Do what is ordered, with ``orders`` for standard input and ``words`` for standard output."""
    for number, end in enumerate((orders, words)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    pace.RESCUE = order["rescue"]
    if order["restart"]:
        restart(order)
    else:
        work(order)


def restart(order: Any) -> None:
    """Let a process do the work, and start another one whenever it dies."""
    child = 0

    def hand_down(number: int, _: Any) -> None:
        if child:
            os.kill(child, number)

    signal.signal(signal.SIGTERM, hand_down)
    while True:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                work(order)
            except BaseException:  # noqa: BLE001 - the test reads standard output only
                handlers.say(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != handlers.DEADLY:
            handlers.say(f"ended with {code}")
            sys.exit(code)
        handlers.say("died")


def work(order: Any) -> None:
    """Serve the queue until a signal comes."""
    threading.Thread(target=handlers.listen, daemon=True).start()
    if order["api"] == "sync":
        serve(order)
    else:
        asyncio.run(serve_async(order))
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        handlers.say("handlers are back")


def prepare(kind: Any, order: Any, handler: Any, session_factory: Any) -> Any:
    """Make a Consumer that says what happens."""
    consumer = kind(models(order["strategy"]).job, handler, session_factory, **order["options"])
    for event in EVENTS:
        consumer.on(event, lambda event: handlers.say(f"{event.name} {event.key[0]}"))
    handlers.say("ready")
    return consumer


def serve(order: Any) -> None:
    """Run Consumers: the last one in this thread, others in threads of their own."""
    engine = prepared(sa.create_engine(order["url"], pool_size=order["pool"]))
    handler = for_sync(getattr(handlers, order["handler"]))
    *others, mine = [prepare(Consumer, order, handler, sessionmaker(engine)) for _ in range(order["consumers"])]

    def run(consumer: Any) -> None:
        try:
            consumer.run()
        except HandlerNotStopped as error:
            handlers.say(f"left {len(error.handlers)}")
        handlers.say("returned")

    threads = [threading.Thread(target=run, args=[other]) for other in others]
    for thread in threads:
        thread.start()
    run(mine)
    for thread in threads:
        thread.join()
    engine.dispose()


async def serve_async(order: Any) -> None:
    """Run Consumers in one event loop."""
    # Named, since before SQLAlchemy 2.0.38 aiosqlite had no pool.
    pool = {"poolclass": sa.AsyncAdaptedQueuePool, "pool_size": order["pool"]}
    engine = prepared(create_async_engine(order["url"], **pool))
    handler = for_async(getattr(handlers, order["handler"]))

    async def run(consumer: Any) -> None:
        await consumer.run()
        handlers.say("returned")

    consumers = [prepare(AsyncConsumer, order, handler, async_sessionmaker(engine)) for _ in range(order["consumers"])]
    await asyncio.gather(*map(run, consumers))
    await engine.dispose()
