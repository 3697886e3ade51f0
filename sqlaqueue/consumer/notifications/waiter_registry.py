"""Who waits for the end of which job: what waiters and Consumers say to each other about it. Pure, no I/O.

The words on a queue's channel::

    await <waiter> <jobs>    somebody waits for the end of these jobs
    ended <jobs>             these jobs have ended, for all that the sender knows

Jobs are a JSON list of the texts by which the ledger knows them as well. A Consumer remembers for a while for whom
somebody waits, and says so when such a job ends; of all others it says nothing. Both are hints: a waiter looks at the
row, and looks again now and then, whatever it hears.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

REMEMBERED = 60.0
"""Seconds for which a Consumer remembers that somebody waits for a job."""

MOST = 10_000
"""How many jobs it remembers; who waits for another one finds its end by looking."""

LONGEST_WORDS = 7_000
"""Bytes; a notification takes fewer than 8,000."""

AWAIT, ENDED = "await ", "ended "


def ended(names: Sequence[str]) -> Iterator[str]:
    """Yield the words that tell of the end of some jobs."""
    some: list[str] = []
    for name in names:
        if some and len(json.dumps([*some, name])) > LONGEST_WORDS:
            yield ENDED + json.dumps(some)
            some = []
        some.append(name)
    if some:
        yield ENDED + json.dumps(some)


def listed(text: str) -> list[str]:
    """Return the jobs in the JSON list of a payload; none if it is malformed."""
    try:
        names = json.loads(text)
    except ValueError:
        return []  # it may come from a newer version
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


class Awaited:
    """The memory of a Consumer: for which jobs somebody waits.

    :param now: the clock.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._until: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def hear(self, words: str) -> bool:
        """Take in words of waiters and of those who answer them; return whether they were such."""
        if words.startswith(AWAIT):
            self._add(listed(words.removeprefix(AWAIT).partition(" ")[2]))
        elif words.startswith(ENDED):
            self.take(listed(words.removeprefix(ENDED)))
        else:
            return False
        return True

    def _add(self, names: Sequence[str]) -> None:
        now = self._now()
        with self._lock:
            for name in names:
                # Anew, and so at the end: the first ones are those that were announced longest ago.
                self._until.pop(name, None)
                self._until[name] = now + REMEMBERED
            for name in list(self._until)[: max(0, len(self._until) - MOST)]:
                del self._until[name]

    def take(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` for whose end somebody waits, and forget them."""
        now = self._now()
        with self._lock:
            return [name for name in names if self._until.pop(name, now) > now]
