"""What a worker process does, see :class:`tests.consumer.bench.Worker`, and its handlers, which tests name."""

import asyncio
import multiprocessing
import os
import posix
import resource
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import pace
from sqlaqueue.exc import HandlerNotStopped
from tests.consumer.models import AsyncHandlerIO, for_async, for_sync, models, prepared

go_on = threading.Event()

EVENTS = ("claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost")

DEADLY = 13
"""The exit code of a worker that a job has killed."""
_dying = threading.Lock()


def say(line: str) -> None:
    """Write a line, whole and at once: the next moment may be this process's last."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def listen() -> None:
    """Let handlers continue when the test writes a line."""
    while os.read(sys.stdin.fileno(), 80):
        go_on.set()


async def _effect(io: Any, job: Any) -> None:
    effect = sa.text("INSERT INTO effect (job, note) VALUES (:job, :note)")
    await io.execute(effect, {"job": job.id, "note": str(os.getpid())})


async def work(io: Any, job: Any) -> None:
    await _effect(io, job)


async def deadly(io: Any, job: Any) -> None:
    await _effect(io, job)
    if job.payload == "poison":
        # One at a time: what measures the coverage writes it down first, and two threads that do crash.
        with _dying:
            os._exit(DEADLY)


async def deadly_batch(io: Any, jobs: Any) -> None:
    """The same for a batch."""
    for job in jobs:
        await deadly(io, job)


async def closing(io: Any, job: Any) -> None:
    """Close the descriptors of the whole process, if the job says so."""
    await _effect(io, job)
    if job.payload == "closing":
        os.closerange(3, 4096)


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


async def greedy(io: Any, job: Any) -> None:
    """Take all memory that this process may have, if the job says so."""
    await _effect(io, job)
    if job.payload == "greedy":
        resource.setrlimit(resource.RLIMIT_AS, (_memory() + 2**28, resource.RLIM_INFINITY))
        hoard = []
        while True:
            hoard.append(bytearray(2**24))


async def wait(io: Any, job: Any) -> None:
    """Have an effect, and wait until the test writes a line."""
    await _effect(io, job)
    say(f"started {job.id}")
    await io.wait(go_on)


async def hang(io: Any, job: Any) -> None:
    """Never return by itself; the row stays unlocked."""
    say(f"started {job.id}")
    await io.wait(threading.Event())


async def hang_with_lock(io: Any, job: Any) -> None:
    """Never return by itself, with the job's own row locked by a write."""
    job.payload = "written"
    await io.flush()
    say(f"started {job.id}")
    await io.wait(threading.Event())


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def forking(io: Any, job: Any) -> None:
    """Fork, and have the copy come back in the way that the job says."""
    await _effect(io, job)
    pid = os.fork()
    if pid:
        say(f"copy ended: {job.payload} {_exit_code(pid)}")
        return
    match job.payload:
        case "raise":
            raise ValueError
        case "exit":
            sys.exit(7)
        case "commit":
            await io.commit()
        case "statement":
            await _effect(io, job)
        case "suspend" if isinstance(io, AsyncHandlerIO):
            # The copy has no running loop for asyncio.sleep(); a future needs none.
            await io.suspend()


def _square(number: int) -> int:
    return number * number


def _exit_with_eight() -> None:
    sys.exit(8)


async def with_children(io: Any, job: Any) -> None:
    """Start a process that ends in a way of its own."""
    await _effect(io, job)
    forks = multiprocessing.get_context("fork")
    match job.payload:
        case "pool":
            with forks.Pool(2) as pool:
                result: object = pool.map(_square, [1, 2, 3])
        case "process" | "terminate":
            endless = job.payload == "terminate"
            process = (
                forks.Process(target=time.sleep, args=(60,)) if endless else forks.Process(target=_exit_with_eight)
            )
            process.start()
            if job.payload == "terminate":
                process.terminate()
            process.join(20)
            result = process.exitcode
        case way:
            pid = os.fork()
            if not pid:
                if way == "exec":
                    os.execv(sys.executable, [sys.executable, "-c", "import os; os._exit(6)"])  # noqa: S606 - no shell is wanted
                os._exit(5)
            result = _exit_code(pid)
    say(f"child: {job.payload} {result}")


def live(order: Any, orders: Connection, words: Connection) -> None:
    """Do what is ordered, with ``orders`` for standard input and ``words`` for standard output."""
    for number, end in enumerate((orders, words)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    pace.RESCUE = order["rescue"]
    if order["url"].startswith("sqlite"):
        os.register_at_fork(after_in_child=end_past_coverage)
    if order["restart"]:
        restart(order)
    else:
        serve_until_signal(order)


def end_past_coverage() -> None:
    """Let ``os._exit`` only exit, also where multiprocessing calls it.

    Coverage extends it by a write to a SQLite file of its own. In a child that may wait without end for a lock of the
    SQLite library, which a thread of the parent had at the fork.
    """
    os._exit = posix._exit


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
                serve_until_signal(order)
            except BaseException:  # noqa: BLE001 - the test reads standard output only
                say(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != DEADLY:
            say(f"ended with {code}")
            sys.exit(code)
        say("died")


def serve_until_signal(order: Any) -> None:
    threading.Thread(target=listen, daemon=True).start()
    if order["api"] == "sync":
        serve(order)
    else:
        asyncio.run(serve_async(order))
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        say("handlers are back")


def prepare(kind: Any, order: Any, handler: Any, session_factory: Any) -> Any:
    """Make a Consumer that says what happens."""
    consumer = kind(models(order["strategy"]).job, handler, session_factory, **order["options"])
    for event in EVENTS:
        consumer.on(event, lambda event: say(f"{event.name} {event.key[0]}"))
    say("ready")
    return consumer


def serve(order: Any) -> None:
    """Run Consumers: the first one in this thread, others in threads of their own, or all of them together."""
    engine = prepared(sa.create_engine(order["url"], pool_size=order["pool"]))
    handler = for_sync(globals()[order["handler"]])
    consumers = [prepare(Consumer, order, handler, sessionmaker(engine)) for _ in range(order["consumers"])]

    def run(consumer: Any) -> None:
        try:
            consumer.run()
        except HandlerNotStopped as error:
            say(f"left {len(error.handlers)}")
        say("returned")

    if order["together"]:
        Consumer.run_all(*consumers)
    else:
        threads = [threading.Thread(target=run, args=[other]) for other in consumers[1:]]
        for thread in threads:
            thread.start()
        run(consumers[0])
        for thread in threads:
            thread.join()
    engine.dispose()


async def serve_async(order: Any) -> None:
    # Named, since before SQLAlchemy 2.0.38 aiosqlite had no pool.
    pool = {"poolclass": sa.AsyncAdaptedQueuePool, "pool_size": order["pool"]}
    engine = prepared(create_async_engine(order["url"], **pool))
    handler = for_async(globals()[order["handler"]])

    async def run(consumer: Any) -> None:
        await consumer.run()
        say("returned")

    consumers = [prepare(AsyncConsumer, order, handler, async_sessionmaker(engine)) for _ in range(order["consumers"])]
    await (AsyncConsumer.run_all(*consumers) if order["together"] else asyncio.gather(*map(run, consumers)))
    await engine.dispose()
