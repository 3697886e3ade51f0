"""Whose turn it is to claim, and whether anybody is still at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlaqueue.crew import Crew


class Turn:
    """One turn of a thread or task: to claim, which one at a time does while the others wait, or to work.

    :param notify: wakes the others; called whenever something changed for them.
    """

    def __init__(self, crew: Crew, notify: Callable[[], None]) -> None:
        self._crew, self._notify = crew, notify
        self._claims = self._works = False
        self._seen = crew.turns_ended

    def to_claim(self) -> bool:
        """Return whether it is this one's turn to claim."""
        with self._crew.lock:
            if self._crew.claiming:
                return False
            self._seen = self._crew.turns_ended
            self._crew.claiming = self._claims = True
            return True

    def to_work(self) -> list[Any]:
        """Return claimed jobs for one call of the handler; empty when none wait."""
        with self._crew.lock:
            unit = self._crew.next_unit()
            if unit:
                self._begin_work()
            return unit

    def claimed(self, jobs: Sequence[Any]) -> None:
        """Note what the claim found; if there was something, another one may claim."""
        self._crew.tell_claimed(jobs)
        with self._crew.lock:
            if not jobs or not self._claims:
                return
            self._claims = self._crew.claiming = False
            if self._crew.plan.holds_transaction:
                self._begin_work()
        self._notify()

    def _begin_work(self) -> None:
        self._works = True
        self._crew.at_work += 1

    def end(self) -> None:
        """Let the others have what this turn held."""
        with self._crew.lock:
            if self._claims:
                self._claims = self._crew.claiming = False
            if self._works:
                self._works = False
                self._crew.at_work -= 1
                self._crew.turns_ended += 1
        self._notify()

    def nothing_left(self) -> bool:
        """Return whether a claim that found nothing means that nothing is due.

        It does when nobody has been at work since before it: what ends meanwhile may be due again at once.
        """
        crew = self._crew
        with crew.lock:
            return crew.at_work == 0 and crew.turns_ended == self._seen and not crew.has_work and not crew.has_finished
