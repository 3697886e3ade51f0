"""Whose turn it is to look for jobs whose lease is over. Pure, no I/O.

One of the consumers that hear each other does so for all, and says it: the others put their own look off. They do not
wait in turn for ever, as by rank alone: those before one may have died, and the workers that are to be noticed with
them.
"""

from __future__ import annotations

from collections.abc import Callable

_NEVER = float("inf")


class Sweeps:
    """When one Consumer does so.

    Whoever is awake to hear that somebody has can tell as well that nobody did. So it is the ear that waits, and the
    keeper sleeps on, as long as what is said is heard.

    :param pause: returns the seconds after which one of a rank looks, if no other has; None where nothing is leased.
    :param now: the clock.
    """

    def __init__(self, pause: Callable[[int], float] | None, now: Callable[[], float]) -> None:
        self._pause, self._now = pause, now
        self._at = _NEVER if pause is None else now()
        self._is_missed = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return self._at <= self._now()

    def begin(self, rank: int) -> None:
        """Note that this one looks.

        Until that is heard as well its keeper counts on no ear: the look may fail, or the connection be half dead.
        """
        if self._pause is not None:
            self._at = self._now() + self._pause(rank)

    def heard(self, rank: int) -> None:
        """Note that somebody has said to look, if only this one itself."""
        self.begin(rank)
        self._is_missed = False

    def until_due(self, *, hears: bool) -> float:
        """Return the seconds until its keeper should look; inf if its ear will tell."""
        return _NEVER if hears and not self._is_missed else self._at - self._now()

    def until_overdue(self) -> float:
        """Return the seconds until its ear should tell that nobody has said so; inf if it has told."""
        return _NEVER if self._is_missed else self._at - self._now()

    def miss(self) -> None:
        """Note that the ear has told."""
        self._is_missed = True
