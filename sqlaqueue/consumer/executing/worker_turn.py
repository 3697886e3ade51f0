"""Whose turn it is to claim, and whether a worker is still busy."""

from __future__ import annotations

from collections.abc import Sequence

from sqlaqueue.consumer.claiming.job_buffer import CallGroup
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.queue.run import Run

_MOST_CLAIMERS, _MANY_PEERS = 2, 3
"""How many workers of a process may claim at once, and from how many Consumers on only one may. While Python processes
one claim, the server executes the other. Many Consumers keep the server busy anyway, and a second claim would have to
skip the rows that they have locked."""


class WorkerTurn:
    """One turn of a worker: it claims jobs, while the other workers wait, or runs claimed ones."""

    def __init__(self, context: ConsumerContext) -> None:
        self._context = context
        self.version = context.version
        """The version of the state on which the decisions of this turn are based."""
        self.claims_alone = False
        """Whether no other worker claims meanwhile."""
        self.clean = True
        """Whether the session of its worker is unused and can be used again."""
        self._claims = False
        self._finished_turns = 0

    # -- to run jobs -----------------------------------------------------------------------------------------------

    def take_jobs(self) -> Executor | None:
        """Return an executor for buffered jobs; None when none wait."""
        context = self._context
        with context.lock:
            group = context.buffer.take()
            if not group:
                return None
            executor = Executor(context, [group], context.completions.add, next_group=context.next_group)
            context.assign(self, executor.runs)
            return executor

    def keep_jobs(self, groups: Sequence[CallGroup], time_limit: float) -> Executor:
        """Return an executor for the jobs of this turn's claim, which begins them within ``time_limit`` seconds."""
        executor = Executor(self._context, groups, self._context.completions.add, time_limit=time_limit)
        self._context.assign(self, executor.runs)
        return executor

    def hold(self, runs: list[Run]) -> None:
        """Record that this turn's transaction holds jobs."""
        self._context.assign(self, lambda: runs)

    # -- to claim --------------------------------------------------------------------------------------------------

    def may_claim(self) -> bool:
        """Return whether it is this worker's turn to claim.

        One worker claims at a time, and none while buffered jobs suffice. Two may claim if more jobs may be pending,
        handlers are quick and Consumers are few: then the server executes one claim while Python processes the other.
        """
        context = self._context
        with context.lock:
            several = (
                context.plenty
                and not context.flow_control
                and context.sizer.is_quick
                and context.polls.peers.count < _MANY_PEERS
            )
            busy = context.buffer and not context.runs_low
            if busy or context.claiming >= (_MOST_CLAIMERS if several else 1):
                return False
            self.claims_alone = context.claiming == 0
            context.claiming += 1
            self._claims = True
            self._finished_turns = context.finished_turns
            return True

    def claimed(self, *, found: bool, more: bool) -> None:
        """Record the result of a claim: if it found jobs, another worker may claim.

        :param more: whether there may be more, so that several workers may claim at once.
        """
        context = self._context
        with context.lock:
            context.plenty = more
            if not found:
                return
            self._claims = False
            context.claiming -= 1
        context.changed()

    def end(self) -> None:
        """Let other workers claim."""
        context = self._context
        with context.lock:
            claimed, self._claims = self._claims, False
            if claimed:
                context.claiming -= 1
            context.unassign(self)
        # A worker that has only run jobs takes the next turn itself.
        if claimed:
            context.changed()

    def takes_the_last(self) -> bool:
        """Return whether a claim that found nothing means that no job is due; until :meth:`end` no other one claims.

        It does if this process has no claimed and no quarantined jobs, no run has ended since the claim began (its job
        may be due again at once), and no other worker is claiming (its claim may have locked jobs).
        """
        context = self._context
        with context.lock:
            quiet = context.is_idle and not context.claiming and context.finished_turns == self._finished_turns
            claimer = context.claimer
            if context.plenty or claimer.unclaimable.is_searching or claimer.held_back.retry_in is not None:
                return False
            self._claims = quiet and not context.quarantine.waiting()
            context.claiming += self._claims
            return self._claims
