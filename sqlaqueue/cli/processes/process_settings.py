"""Settings of a whole process: logging, garbage collection, thread switching.

Only the command line sets them, because the whole process is its own. A Consumer runs in an application's process.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

from sqlaqueue.texts import printable

_YOUNGEST_GENERATION = 50_000
"""Allocations before the garbage collector runs: more than the jobs of a few batches need."""

_SWITCH_INTERVAL = 0.001
"""Seconds a thread may run while another one, which has its reply from the database, waits for the interpreter."""


class PlainFormatter(logging.Formatter):
    """Records whose lines cannot be taken for others: keys, errors and names are input of others.

    The first line of a record is the only one that is not indented, and nothing is left that a terminal would obey.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """Return the first line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as above
        """Return the traceback."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - as above
        """Return the stack."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.split("\n"))


def configure_logging(level: str | None) -> None:
    """Log to standard error, unless the application has configured logging.

    :param level: the lowest level to log; None for INFO, or for what the application has configured.
    """
    number = logging.getLevelNamesMapping()[(level or "info").upper()]
    if not logging.getLogger().handlers:
        # Other libraries log no more than INFO.
        root = max(number, logging.INFO)
        handler = logging.StreamHandler()
        handler.setFormatter(PlainFormatter("%(asctime)s [%(process)d] %(levelname)s %(message)s"))
        logging.basicConfig(level=root, handlers=[handler])
        logging.getLogger("sqlaqueue").setLevel(number)
    elif level is not None:
        logging.getLogger("sqlaqueue").setLevel(number)


def tune_interpreter() -> None:
    """Run the garbage collector less often, and switch threads more often.

    A job is about ten objects, which are freed when it is settled. With Python's default threshold most of them are
    scanned before that, moved to an older generation, and scanned again together with the application.
    """
    gc.freeze()
    youngest, *older = gc.get_threshold()
    # 0 means that the application has disabled the collector.
    if 0 < youngest < _YOUNGEST_GENERATION:
        gc.set_threshold(_YOUNGEST_GENERATION, *older)
    sys.setswitchinterval(_SWITCH_INTERVAL)
