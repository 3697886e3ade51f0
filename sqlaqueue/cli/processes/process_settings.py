"""Settings of a whole process: logging, garbage collection, thread switching.

Only the command line sets them, because the whole process is its own. A Consumer runs in an application's process.
"""

from __future__ import annotations

import gc
import logging
import sys

_YOUNGEST_GENERATION = 50_000
"""Allocations before the garbage collector runs: more than the jobs of a few batches need."""

_SWITCH_INTERVAL = 0.001
"""Seconds a thread may run while another one, which has its reply from the database, waits for the interpreter."""


def configure_logging(level: str | None) -> None:
    """Log to standard error, unless the application has configured logging.

    :param level: the lowest level to log; None for INFO, or for what the application has configured.
    """
    number = logging.getLevelNamesMapping()[(level or "info").upper()]
    if not logging.getLogger().handlers:
        # Other libraries log no more than INFO.
        root = max(number, logging.INFO)
        logging.basicConfig(level=root, format="%(asctime)s [%(process)d] %(levelname)s %(message)s")
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
