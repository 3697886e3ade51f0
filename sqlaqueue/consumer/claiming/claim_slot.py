"""Whose turn it is to claim, and whether anybody is still at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.executing.executor import Hand
from sqlaqueue.queue.run import Run

_MOST_CLAIMERS, _CROWD = 2, 3
"""How many claim at once, so that the server has something to do while Python works; in a crowd the others see to that,
and each claim more would only have to pass over what they have locked."""


class Turn:
    """One turn of a thread or task: to claim, which one at a time does while the others wait, or to work."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.version = crew.version
        """What this turn's decisions are based on; who rests because of them is woken by anything newer."""
        self.claims_alone = False
        """Whether nobody else claims meanwhile."""
        self.clean = True
        """Whether it has left the session of its lane as good as new."""
        self._claims = False
        self._works_ended = 0

    def to_work(self) -> Hand | None:
        """Return claimed jobs for one call of the handler; None when none wait."""
        with self._crew.lock:
            unit = self._crew.next_unit()
            if not unit:
                return None
            return self._take(Hand(self._crew, [unit], self._crew.finish, further=self._crew.further_unit))

    def take(self, units: Sequence[Sequence[Any]], enough: float) -> Hand:
        """Return the jobs of a claim as what this turn has in hand, for some seconds."""
        return self._take(Hand(self._crew, units, self._crew.finish, enough=enough))

    def _take(self, hand: Hand) -> Hand:
        self._crew.take_in_hand(self, hand.held)
        return hand

    def to_claim(self) -> bool:
        """Return whether it is this one's turn to claim.

        Not while somebody else does, unless there is plenty: then the server works for one while another works.
        """
        crew = self._crew
        with crew.lock:
            several = crew.plenty and crew.pace.is_quick and crew.calls.crowd < _CROWD
            if (crew.has_work and not crew.runs_low) or crew.claiming >= (_MOST_CLAIMERS if several else 1):
                return False
            self.claims_alone = crew.claiming == 0
            crew.claiming += 1
            self._claims = True
            self._works_ended = crew.works_ended
            return True

    def claimed(self, *, found: bool, more: bool) -> None:
        """Note what a claim has come to: if there was something, another one may claim.

        :param more: whether there may be more, so that several may claim at once.
        """
        crew = self._crew
        with crew.lock:
            crew.plenty = more
            if not found:
                return
            self._claims = False
            crew.claiming -= 1
        crew.changed()

    def hold(self, runs: list[Run]) -> None:
        """Note that this turn's transaction holds jobs."""
        self._crew.take_in_hand(self, lambda: runs)

    def end(self) -> None:
        """Let the others have what this turn held."""
        crew = self._crew
        with crew.lock:
            claimed, self._claims = self._claims, False
            if claimed:
                crew.claiming -= 1
            crew.put_down(self)
        # Whoever has only worked takes the next turn itself.
        if claimed:
            crew.changed()

    def nothing_left(self) -> bool:
        """Return whether a claim that found nothing means that nothing is due.

        It does when nobody has been at work since before it: what ends meanwhile may be due again at once. Nor may
        anybody else claim: jobs may be locked by a claim that is not here yet.
        """
        crew = self._crew
        with crew.lock:
            quiet = crew.at_rest and not crew.claiming and crew.works_ended == self._works_ended
            return quiet and not crew.plan.suspects.remembered()
