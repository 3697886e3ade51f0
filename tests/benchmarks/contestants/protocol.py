"""What every contestant speaks: a program with three verbs, and lines of JSON.

It is imported by programs in environments of their own, so it needs nothing but the standard library. A contestant
written in Python is a subclass of :class:`Adapter` and ends with ``main(Its)``; ``protocol.mjs`` is the same for Node.

``PROGRAM prepare OPTIONS``
    makes the schema in an empty database, and prints ``{"event": "prepared", "remaining": SQL, "versions": {...}}``.
    The SQL finds the jobs that are due and have not been done. There may be more: ``finish`` makes all jobs finished
    ones, and ``lock`` locks the first of them; a contestant without it is not asked for what needs it.

``PROGRAM enqueue OPTIONS``
    prints ``{"event": "ready"}``, then answers each line of its input, an order such as
    ``{"jobs": 1000, "chunk": 100, "way": "bulk"}``, by ``{"event": "enqueued", "jobs": 1000, "seconds": 0.1}``.

``PROGRAM work OPTIONS``
    prints ``ready`` when it has all that it needs to begin, begins at the line ``go``, tells every few milliseconds how
    many jobs it has handled, and ends at once at the line ``stop``.

OPTIONS is one JSON object: ``url``, ``tuned``, ``handler`` (``read``, ``stamp`` or ``sleep``), ``report_every`` in
seconds, and whatever the variant of the contestant says.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NoReturn

FIELDS = ("recipient", "subject", "note", "reference", "language", "account", "amount", "share", "urgent", "sent")
"""What each job carries: ten values, about 200 bytes as JSON."""

SLEEP = 0.05
"""Seconds that the handler ``sleep`` takes."""

YOUNG = 50_000
"""How many new objects Python's garbage collector waits for in a program that is driven at its best."""

SWITCH = 0.001
"""Seconds for which one of its threads may go on while another one waits."""

_REPORT_EVERY = 0.02

_telling = threading.Lock()


def tell(event: str, **values: Any) -> None:
    """Print one event."""
    with _telling:
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()


def payloads(number: int, first: int = 0) -> list[dict[str, Any]]:
    """Return what ``number`` jobs carry; the moment at which they are sent is now."""
    sent = time.time()
    return [
        {
            "recipient": f"user{index}@example.com",
            "subject": "Your order is on its way",
            "note": "left at the door, as agreed",
            "reference": f"{index:032x}",
            "language": "en",
            "account": index % 5000,
            "amount": 1999,
            "share": 0.25,
            "urgent": False,
            "sent": sent,
        }
        for index in range(first, first + number)
    ]


def version_of(*distributions: str) -> dict[str, str]:
    """Return the installed versions of some packages."""
    return {name: metadata.version(name) for name in distributions}


class Meter:
    """Counts what the handlers of this process do, and tells the harness.

    :param handler: ``read`` reads every field, ``stamp`` also notes when, ``sleep`` waits for `SLEEP` seconds.
    :param report_every: the seconds between reports.
    """

    def __init__(self, handler: str, report_every: float = _REPORT_EVERY) -> None:
        self.handler, self._report_every = handler, report_every
        self._counter = itertools.count()
        self._stamps: list[tuple[float, float]] = []
        self._cpu = 0.0

    def done(self, sent: float) -> None:
        """Count a job. Safe in threads: one call of C counts it."""
        if self.handler == "stamp":
            self._stamps.append((sent, time.time()))
        next(self._counter)

    def read(self, payload: Mapping[str, Any]) -> None:
        """Handle a job, whose fields are in a mapping."""
        for field in FIELDS:
            sent = payload[field]
        self.done(sent)

    def handle(self, payload: Mapping[str, Any]) -> None:
        """Handle a job in a thread."""
        if self.handler == "sleep":
            time.sleep(SLEEP)
        self.read(payload)

    async def handle_async(self, payload: Mapping[str, Any]) -> None:
        """Handle a job in a task."""
        if self.handler == "sleep":
            await asyncio.sleep(SLEEP)
        self.read(payload)

    def wait_for_go(self) -> None:
        """Say that this worker is ready, and wait for the start; from then on its counts are told."""
        tell("ready")
        if sys.stdin.readline().strip() != "go":
            os._exit(0)
        self._cpu = time.process_time()
        threading.Thread(target=self._report, daemon=True).start()
        threading.Thread(target=self._await_stop, daemon=True).start()

    def count(self) -> int:
        """Return how many jobs have been handled."""
        # The only way to look at a counter without moving it.
        return int(self._counter.__reduce__()[1][0])

    def _take_stamps(self) -> list[tuple[float, float]]:
        taken, self._stamps = self._stamps, []
        return taken

    def _report(self) -> None:
        told = 0
        while True:
            time.sleep(self._report_every)
            count = self.count()
            if count != told:
                told = count
                tell("count", jobs=count, time=time.time(), stamps=self._take_stamps())

    def _await_stop(self) -> NoReturn:
        # An end of the input means the same: the harness is gone.
        sys.stdin.readline()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        tell(
            "end",
            jobs=self.count(),
            cpu=time.process_time() - self._cpu,
            peak_kib=usage.ru_maxrss,
            stamps=self._take_stamps(),
        )
        # Whatever is under way, the database is thrown away.
        os._exit(0)


class Adapter:
    """One contestant: how its schema is made, how jobs get in, and how a process of workers is run.

    :param options: what the harness and the variant say.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.url: str = options["url"]
        self.tuned: bool = options.get("tuned", False)

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """What makes the event loop of a worker; None for that of Python."""
        return None

    def prepare(self) -> Any:
        """Make the schema; return the SQL that tells whether a job is left, the versions in use, and more SQL.

        That is ``finish``, which makes all jobs finished ones, and ``lock``, which locks the first of them, by name.
        """
        raise NotImplementedError

    def open(self) -> Any:
        """Connect, before the first `enqueue`."""

    def enqueue(self, jobs: list[dict[str, Any]], order: Mapping[str, Any]) -> Any:
        """Enqueue and commit ``jobs``: one by one if ``order["way"]`` is ``"one"``, at once otherwise.

        ``order`` may have a ``priority`` (lower first) and a ``delay`` in seconds.
        """
        raise NotImplementedError

    def work(self, meter: Meter) -> Any:
        """Set workers up, wait for the start by the meter, and serve the queue for ever."""
        raise NotImplementedError


def main(adapter: type[Adapter]) -> None:
    """Be the program of a contestant."""
    verb, options = sys.argv[1], json.loads(sys.argv[2])
    made = adapter(options)
    match verb:
        case "prepare":
            remaining, versions, words = _now(made.prepare())
            tell("prepared", remaining=remaining, versions=versions, **words)
        case "enqueue":
            _now(_serve_orders(made))
        case "work":
            if made.tuned:
                gc.freeze()
                gc.set_threshold(YOUNG)
                sys.setswitchinterval(SWITCH)
            meter = Meter(options.get("handler", "read"), options.get("report_every", _REPORT_EVERY))
            _now(made.work(meter), made.loop_factory)
        case _:
            msg = f"no verb of a contestant: {verb}"
            raise SystemExit(msg)


def _now(result: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> Any:
    if not inspect.iscoroutine(result):
        return result
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(result)


async def _maybe(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _serve_orders(adapter: Adapter) -> None:
    """Answer the orders on the input; in one event loop, for those contestants that have one."""
    await _maybe(adapter.open())
    tell("ready")
    first = 0
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        begun = time.perf_counter()
        if order.get("interval"):
            await _send_steadily(adapter, order, first)
        else:
            for chunk in _chunks(order["jobs"], order["chunk"]):
                await _maybe(adapter.enqueue(payloads(len(chunk), first + chunk.start), order))
        first += order["jobs"]
        tell("enqueued", jobs=order["jobs"], seconds=time.perf_counter() - begun)


async def _send_steadily(adapter: Adapter, order: Mapping[str, Any], first: int) -> None:
    """Send a chunk each ``interval`` seconds by the clock: a slow one makes the next ones late, not fewer."""
    start = time.perf_counter()
    for number, chunk in enumerate(_chunks(order["jobs"], order["chunk"])):
        wait = start + number * order["interval"] - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        await _maybe(adapter.enqueue(payloads(len(chunk), first + chunk.start), order))


def _chunks(number: int, size: int) -> Iterator[range]:
    for start in range(0, number, size):
        yield range(start, min(start + size, number))
