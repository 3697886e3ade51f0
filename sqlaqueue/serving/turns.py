"""Whose turn it is to claim, and whether anybody is still at work."""

from __future__ import annotations

from typing import Any

from sqlaqueue.serving.crew import Crew, runs_of
from sqlaqueue.spec import Run


class Turn:
    """One turn of a thread or task: to claim, which one at a time does while the others wait, or to work."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.version = crew.version
        """What this turn's decisions are based on; who rests because of them is woken by anything newer."""
        self._claims = False
        self._works_ended = 0

    def to_work(self) -> list[Any]:
        """Return claimed jobs for one call of the handler; empty when none wait."""
        with self._crew.lock:
            unit = self._crew.next_unit()
            if unit:
                self._crew.take_in_hand(self, runs_of(unit))
            return unit

    def to_claim(self) -> bool:
        """Return whether it is this one's turn to claim; not while somebody else does, or has just found something."""
        crew = self._crew
        with crew.lock:
            if crew.claiming or crew.has_work:
                return False
            crew.claiming = self._claims = True
            self._works_ended = crew.works_ended
            return True

    def claimed(self, runs: list[Run]) -> None:
        """Note what the claim found; if there was something, another one may claim."""
        crew = self._crew
        with crew.lock:
            if not runs:
                return
            self._claims = crew.claiming = False
            if crew.plan.holds_transaction:
                crew.take_in_hand(self, runs)
        crew.changed()

    def tell_claimed(self, runs: list[Run]) -> None:
        """Announce that jobs are about to be run."""
        self._crew.tell_claimed(runs)

    def end(self) -> None:
        """Let the others have what this turn held."""
        crew = self._crew
        with crew.lock:
            claimed, self._claims = self._claims, False
            if claimed:
                crew.claiming = False
            worked = crew.put_down(self)
        if claimed or worked:
            crew.changed()

    def nothing_left(self) -> bool:
        """Return whether a claim that found nothing means that nothing is due.

        It does when nobody has been at work since before it: what ends meanwhile may be due again at once.
        """
        crew = self._crew
        with crew.lock:
            return crew.at_rest and crew.works_ended == self._works_ended and not crew.plan.suspects.remembered()
