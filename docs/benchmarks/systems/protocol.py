"""The protocol of the programs that run the systems: three commands, and lines of JSON.

Programs in environments of their own import this module, so it needs only the standard library. A program in Python
has a subclass of :class:`Adapter` and ends with ``main(ItsAdapter)``; ``protocol.mjs`` is the same for Node.

``PROGRAM prepare OPTIONS``
    creates the schema in an empty database, and prints ``{"event": "prepared", "remaining": SQL, "versions": {...}}``.
    The SQL selects unfinished jobs that are due. Optional statements are ``finish``, which marks all jobs as finished,
    ``lock``, which locks the first one, and ``due``, which returns the number of due jobs and for how many seconds the
    oldest has been due. Cases that need them skip other systems.

``PROGRAM enqueue OPTIONS``
    prints ``{"event": "ready"}``, then replies to each line of its input, a request such as
    ``{"jobs": 1000, "chunk": 100, "way": "bulk"}``, with ``{"event": "enqueued", "jobs": 1000, "seconds": 0.1}``.

``PROGRAM work OPTIONS``
    prints ``ready`` when it can start, starts at the line ``go``, prints the number of handled jobs every few
    milliseconds, and exits at the line ``stop``.

OPTIONS is a JSON object with ``url``, ``tuned``, ``handler`` (``read``, ``stamp`` or ``sleep``), ``report_every`` in
seconds, and the options of the system. With ``runs``, a directory, and ``most_runs`` each worker records there when its
handlers begin and end. With ``flow`` a system controls the flow of its jobs, whose key is the field ``account``;
``keys``, the number of different keys, is in the requests and in the options; ``first_key`` in requests only.

A request with ``interval`` enqueues a chunk every so many seconds. With ``outlast`` an error does not end it, and the
reply has ``acknowledged``: for each commit that has succeeded the number of its first job, of its jobs, and the time.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import mmap
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

FIELDS = ("recipient", "subject", "note", "reference", "language", "account", "amount", "share", "urgent", "sent")
"""The fields of a job: ten values, about 200 bytes as JSON."""

KEYS = 5000
"""How many different accounts there are."""

SLEEP = 0.05
"""Duration of the handler ``sleep`` in seconds, unless the options have another one."""

RUN_RECORD = "<qqdd"
"""A run of a handler: the key and the number of its job, the times of its begin and its end, 0 before it has ended."""

YOUNGEST_GENERATION = 50_000
"""Threshold of the garbage collector in tuned programs."""

SWITCH_INTERVAL = 0.001
"""Interval of thread switching in tuned programs, in seconds."""

MOST_LATE = 1.0
"""Seconds after which a producer that outlasts faults skips a chunk, so that an outage is not followed by a burst."""

_REPORT_EVERY = 0.02

_output_lock = threading.Lock()


def emit(event: str, **values: Any) -> None:
    """Print an event."""
    with _output_lock:
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()


def payloads(number: int, first: int = 0, keys: int = KEYS, first_key: int = 0) -> list[dict[str, Any]]:
    """Return the payloads of ``number`` jobs, with the current time in ``sent``, and so many different accounts."""
    sent = time.time()
    return [
        {
            "recipient": f"user{index}@example.com",
            "subject": "Your order is on its way",
            "note": "left at the door, as agreed",
            "reference": f"{index:032x}",
            "language": "en",
            "account": first_key + index % keys,
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


class RunLog:
    """Records when handlers begin and end, in a file that is complete even if the process is killed.

    The file is mapped into memory, so that recording needs no system call, which would let another thread run.

    :param directory: has a file for each process.
    :param most: the largest number of runs.
    """

    def __init__(self, directory: str, most: int) -> None:
        self._record = struct.Struct(RUN_RECORD)
        self._end = struct.Struct("<d")
        self._places = itertools.count()
        # A process ID alone may be that of a process that was killed before.
        name = f"{os.getpid()}-{time.time_ns()}"
        with (Path(directory) / name).open("w+b") as file:
            file.truncate(most * self._record.size)
            self._memory = mmap.mmap(file.fileno(), 0)

    def begin(self, key: int, reference: str) -> int:
        """Record that a job begins; return the place of its record."""
        place = next(self._places) * self._record.size
        self._record.pack_into(self._memory, place, key, int(reference, 16), time.perf_counter(), 0.0)
        return place

    def end(self, place: int) -> None:
        """Record that it has ended."""
        self._end.pack_into(self._memory, place + self._record.size - self._end.size, time.perf_counter())


class Meter:
    """Counts the handled jobs of this process, and reports them.

    :param handler: ``read`` reads every field, ``stamp`` also records the time, ``sleep`` waits for `sleep` seconds.
    :param report_every: seconds between reports.
    :param runs: where to record when handlers begin and end; None for nowhere.
    """

    def __init__(
        self,
        handler: str,
        report_every: float = _REPORT_EVERY,
        *,
        sleep: float = SLEEP,
        runs: RunLog | None = None,
    ) -> None:
        self.handler, self._report_every = handler, report_every
        self.sleep, self.runs = sleep if handler == "sleep" else 0.0, runs
        self._counter = itertools.count()
        self._stamps: list[tuple[float, float]] = []
        self._cpu = 0.0

    def done(self, sent: float) -> None:
        """Count a job; safe for use by several threads."""
        if self.handler == "stamp":
            self._stamps.append((sent, time.time()))
        next(self._counter)

    def read(self, payload: Mapping[str, Any]) -> None:
        """Read all fields of a job, and count it."""
        for field in FIELDS:
            sent = payload[field]
        self.done(sent)

    def handle(self, payload: Mapping[str, Any]) -> None:
        """Handle a job in a thread."""
        place = self.runs.begin(payload["account"], payload["reference"]) if self.runs else 0
        if self.sleep:
            time.sleep(self.sleep)
        self.read(payload)
        if self.runs:
            self.runs.end(place)

    async def handle_async(self, payload: Mapping[str, Any]) -> None:
        """Handle a job in a task."""
        place = self.runs.begin(payload["account"], payload["reference"]) if self.runs else 0
        if self.sleep:
            await asyncio.sleep(self.sleep)
        self.read(payload)
        if self.runs:
            self.runs.end(place)

    def wait_for_go(self) -> None:
        """Report that this worker is ready, wait for the start, and begin to report counts."""
        emit("ready")
        if sys.stdin.readline().strip() != "go":
            os._exit(0)
        self._cpu = time.process_time()
        threading.Thread(target=self._report, daemon=True).start()
        threading.Thread(target=self._await_stop, daemon=True).start()

    def count(self) -> int:
        """Return the number of handled jobs."""
        # The only way to read a counter without incrementing it.
        return int(self._counter.__reduce__()[1][0])

    def _take_stamps(self) -> list[tuple[float, float]]:
        taken, self._stamps = self._stamps, []
        return taken

    def _report(self) -> None:
        reported = 0
        while True:
            time.sleep(self._report_every)
            count = self.count()
            if count != reported:
                reported = count
                emit("count", jobs=count, time=time.time(), stamps=self._take_stamps())

    def _await_stop(self) -> NoReturn:
        # The end of the input means that the harness has ended.
        sys.stdin.readline()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        emit(
            "end",
            jobs=self.count(),
            cpu=time.process_time() - self._cpu,
            peak_kib=usage.ru_maxrss,
            stamps=self._take_stamps(),
        )
        # No cleanup, as the database is dropped.
        os._exit(0)


class Adapter:
    """Runs one system.

    :param options: the options of the command and of the system.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.url: str = options["url"]
        self.tuned: bool = options.get("tuned", False)

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """The factory of a worker's event loop; None for Python's."""
        return None

    def prepare(self) -> Any:
        """Create the schema; return the SQL for remaining jobs, the versions of packages, and optional statements."""
        raise NotImplementedError

    def open(self) -> Any:
        """Connect; called before the first `enqueue`."""

    def reopen(self) -> Any:
        """Connect again after an error."""
        return self.open()

    def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> Any:
        """Enqueue and commit ``jobs``: one by one if ``request["way"]`` is ``"one"``, else together.

        ``request`` may have a ``priority`` (lower first) and a ``delay`` in seconds.
        """
        raise NotImplementedError

    def work(self, meter: Meter) -> Any:
        """Set up workers, call ``meter.wait_for_go()``, and run jobs until the process ends."""
        raise NotImplementedError


def main(adapter: type[Adapter]) -> None:
    """Run the program of a system."""
    verb, options = sys.argv[1], json.loads(sys.argv[2])
    made = adapter(options)
    match verb:
        case "prepare":
            remaining, versions, statements = _now(made.prepare())
            emit("prepared", remaining=remaining, versions=versions, **statements)
        case "enqueue":
            _now(_serve_requests(made))
        case "work":
            if made.tuned:
                gc.freeze()
                gc.set_threshold(YOUNGEST_GENERATION)
                sys.setswitchinterval(SWITCH_INTERVAL)
            meter = Meter(
                options.get("handler", "read"),
                options.get("report_every", _REPORT_EVERY),
                sleep=options.get("sleep", SLEEP),
                runs=RunLog(options["runs"], options["most_runs"]) if "runs" in options else None,
            )
            _now(made.work(meter), made.loop_factory)
        case _:
            msg = f"unknown command: {verb}"
            raise SystemExit(msg)


def _now(result: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> Any:
    if not inspect.iscoroutine(result):
        return result
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(result)


async def _maybe(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _serve_requests(adapter: Adapter) -> None:
    """Reply to the requests on standard input, in one event loop."""
    await _maybe(adapter.open())
    emit("ready")
    first = 0
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        start, more = time.perf_counter(), {}
        if request.get("outlast"):
            more["acknowledged"] = await _send_through_faults(adapter, request, first)
        elif request.get("interval"):
            await _send_steadily(adapter, request, first)
        else:
            for chunk in _chunks(request["jobs"], request["chunk"]):
                keys, first_key = request.get("keys", KEYS), request.get("first_key", 0)
                jobs = payloads(len(chunk), first + chunk.start, keys, first_key)
                await _maybe(adapter.enqueue(jobs, request))
        first += request["jobs"]
        emit("enqueued", jobs=request["jobs"], seconds=time.perf_counter() - start, **more)


async def _send_steadily(adapter: Adapter, request: Mapping[str, Any], first: int) -> None:
    """Enqueue a chunk every ``interval`` seconds by the clock; after a slow one the next ones are late."""
    start = time.perf_counter()
    for number, chunk in enumerate(_chunks(request["jobs"], request["chunk"])):
        wait = start + number * request["interval"] - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        await _maybe(adapter.enqueue(payloads(len(chunk), first + chunk.start), request))


async def _send_through_faults(
    adapter: Adapter, request: Mapping[str, Any], first: int
) -> list[tuple[int, int, float]]:
    """Enqueue a chunk every ``interval`` seconds whatever happens; return what was acknowledged, and when.

    The jobs of a chunk that has failed are not sent again: whether they were committed is unknown.
    """
    start, acknowledged, is_connected = time.perf_counter(), [], True
    for number, chunk in enumerate(_chunks(request["jobs"], request["chunk"])):
        wait = start + number * request["interval"] - time.perf_counter()
        if wait < -MOST_LATE:
            continue
        await asyncio.sleep(max(wait, 0))
        try:
            if not is_connected:
                await _maybe(adapter.reopen())
                is_connected = True
            await _maybe(adapter.enqueue(payloads(len(chunk), first + chunk.start), request))
        except Exception as error:  # noqa: BLE001 - each driver has errors of its own, and the next chunk may succeed
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            is_connected = False
        else:
            acknowledged.append((first + chunk.start, len(chunk), time.perf_counter()))
    return acknowledged


def _chunks(number: int, size: int) -> Iterator[range]:
    for start in range(0, number, size):
        yield range(start, min(start + size, number))
