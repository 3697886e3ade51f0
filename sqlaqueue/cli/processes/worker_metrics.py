"""The metrics of worker processes, if prometheus_client is installed."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlaqueue.consumer.base import ConsumerBase

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which prometheus_client keeps the metrics of a process in files, for another process to add up."""

_ENDED = 0
"""Stands for the processes that have ended, in the name of a file; no process has this id."""

_reading = threading.Lock()
"""Held while files are read or added up: a value would be counted twice, or not at all."""

ReadMetrics = Callable[[], tuple[str, bytes]]


def is_available() -> bool:
    """Return whether prometheus_client is installed."""
    return find_spec("prometheus_client") is not None


def instrument_all(consumers: Sequence[ConsumerBase]) -> None:
    """Measure Consumers; those that the application has instrumented itself are left as they are."""
    if is_available():
        from sqlaqueue.prometheus import instrument  # noqa: PLC0415 - optional

        for consumer in consumers:
            instrument(consumer)


def of_this_process() -> ReadMetrics | None:
    """Return a function that reads the metrics of this process; None without prometheus_client."""
    if not is_available():
        return None
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - optional

    return lambda: (CONTENT_TYPE_LATEST, generate_latest())


@contextlib.contextmanager
def shared_directory(*, wanted: bool) -> Iterator[str | None]:
    """Make a directory for the metrics of several processes, and remove it after the block.

    A directory that the environment names already is used, and left as it is.
    """
    given = os.environ.get(DIRECTORY)
    if not wanted or not is_available() or given:
        yield given if wanted else None
        return
    with tempfile.TemporaryDirectory(prefix="sqlaqueue-metrics-") as directory:
        yield directory


def of_processes(directory: str | None) -> ReadMetrics | None:
    """Return a function that adds up the metrics in a directory; None without one."""
    if directory is None or not is_available():
        return None
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415 - optional
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415 - as above

    collect: Any = MultiProcessCollector  # it has no types

    def read() -> tuple[str, bytes]:
        registry = CollectorRegistry()
        collect(registry, path=directory)
        with _reading:
            return CONTENT_TYPE_LATEST, generate_latest(registry)

    return read


def forget_process(pid: int, directory: str | None) -> None:
    """Remove the gauges of a process that has ended; its counters stay, added up with those of earlier ones."""
    if directory is not None and is_available():
        from prometheus_client.multiprocess import mark_process_dead  # noqa: PLC0415 - optional

        forget: Any = mark_process_dead  # it has no types
        forget(pid, path=directory)
        if directory != os.environ.get(DIRECTORY):
            # Programs that share a directory read it at any time.
            for kind in ("counter", "histogram", "summary"):
                _add_up(Path(directory, f"{kind}_{pid}.db"), Path(directory, f"{kind}_{_ENDED}.db"))


def _add_up(ended: Path, total: Path) -> None:
    """Add the values of a file to those of another one, and remove it: a process that dies again and again leaves one.

    A file that a killed process has left damaged stays.
    """
    from prometheus_client.mmap_dict import MmapedDict  # noqa: PLC0415 - optional

    values: Any = MmapedDict  # it has no types
    with _reading, contextlib.suppress(FileNotFoundError, RuntimeError, ValueError, struct.error):
        added = [(key, value) for key, value, *_ in values.read_all_values_from_file(str(ended))]
        both = values(str(total))
        try:
            for key, value in added:
                both.write_value(key, both.read_value(key)[0] + value, 0.0)
        finally:
            both.close()
        ended.unlink()
