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
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence

REMEMBERED = 60.0
"""Seconds for which a Consumer remembers that somebody waits for a job."""

MOST = 10_000
"""How many jobs it remembers; who waits for another one finds its end by looking."""

REPEAT = 20.0
"""Seconds between announcements of one waiter, for Consumers that have come since, and for those that forget."""

LONGEST_WORDS = 7_000
"""Bytes; a notification takes fewer than 8,000."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE, LONGEST_DEAF_PAUSE = 5.0, 1.0
"""Seconds between looks: in the beginning, and at most for one who hears what is said, and for one who does not."""

_AWAIT, _ENDED = "await ", "ended "


def ended(names: Sequence[str]) -> Iterator[str]:
    """Yield the words that tell of the end of some jobs."""
    some: list[str] = []
    for name in names:
        if some and len(json.dumps([*some, name])) > LONGEST_WORDS:
            yield _ENDED + json.dumps(some)
            some = []
        some.append(name)
    if some:
        yield _ENDED + json.dumps(some)


def _listed(text: str) -> list[str]:
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
        if words.startswith(_AWAIT):
            self._add(_listed(words.removeprefix(_AWAIT).partition(" ")[2]))
        elif words.startswith(_ENDED):
            self.take(_listed(words.removeprefix(_ENDED)))
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


class Waiting:
    """The ear and the patience of one who waits for the end of one job.

    :param name: the text by which the job is known.
    :param called: called when a look may be due.
    :param timeout: seconds; None to wait without an end.
    :param now: the clock.
    :param draw: returns numbers from [0, 1), to spread announcements.
    """

    def __init__(
        self,
        name: str,
        called: Callable[[], object],
        timeout: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._name, self._called, self._now, self._draw = name, called, now, draw
        self._quoted = json.dumps(name)
        self.id = uuid.uuid4().hex
        self.words = f"{_AWAIT}{self.id} {json.dumps([name])}"
        """What it announces."""
        self._since = self._announce_at = now()
        self._deadline = float("inf") if timeout is None else self._since + timeout
        self._look_at = self._since + FIRST_PAUSE
        self._tries = 0
        self._is_called = False
        self.hears = False
        """Whether it has heard its own announcement, and so would hear of the end."""
        self.announces = len(self.words) <= LONGEST_WORDS
        """Whether it says for what it waits; else it only looks."""

    # -- what is heard, in whichever thread ------------------------------------------------------------------------

    def hear(self, words: str) -> None:
        """Take in a notification."""
        if words == self.words:
            if not self.hears:
                # The job may have ended before anybody knew that it is waited for.
                self.hears, self._announce_at = True, self._now() + self._repeat()
                self._call()
        elif words.startswith(_ENDED) and self._quoted in words and self._name in _listed(words.removeprefix(_ENDED)):
            # From now on it is looked for more often: what is read may be behind what is said.
            self._since = self._now()
            self._call()

    def went_deaf(self) -> None:
        """Announce again, such as when the channel is listened to by another connection."""
        self.hears = False
        self._announce_at, self._tries = self._now(), 0
        self._called()

    def until_missed(self) -> float:
        """Whoever waits looks again by itself."""
        return float("inf")

    def missed(self) -> None:
        """Nothing is counted on."""

    def _call(self) -> None:
        self._is_called = True
        self._called()

    # -- what is due -----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the time to wait is over."""
        return self._deadline <= self._now()

    def pause(self) -> float:
        """Return the seconds until something is due."""
        if self._is_called:
            return 0.0
        due = min(self._look_at, self._deadline, self._announce_at if self.announces else float("inf"))
        return max(0.0, due - self._now())

    def wants_announcement(self) -> bool:
        """Return whether it is time to announce; if so it is taken for done."""
        now = self._now()
        if not self.announces or self._announce_at > now:
            return False
        # One that is not heard may have come before anybody listened.
        soon = 2 * FIRST_PAUSE * 2.0 ** min(self._tries, 20)
        self._announce_at = now + (self._repeat() if self.hears else min(soon, self._repeat()))
        self._tries += 1
        return True

    def _repeat(self) -> float:
        # Spread: many may have begun to wait in one moment.
        return REPEAT * (0.8 + 0.4 * self._draw())

    def wants_look(self) -> bool:
        """Return whether it is time to look; if so, calls from now on ask for another look."""
        if self._is_called or min(self._look_at, self._deadline) <= self._now():
            self._is_called = False
            return True
        return False

    def looked(self) -> None:
        """Note that a look has found the job still on its way: the longer it takes, the longer is the next pause."""
        now = self._now()
        longest = LONGEST_PAUSE if self.hears else LONGEST_DEAF_PAUSE
        self._look_at = now + min(max(FIRST_PAUSE, (now - self._since) / 2), longest)
