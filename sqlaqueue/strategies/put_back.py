"""Putting back what a claim took whose transaction was committed before its runs had ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.keys import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies.base import ClaimedJobs, Verb
from sqlaqueue.strategies.delete_row import OwnMessage, rows_again
from sqlaqueue.strategies.key_range import KeyRange


@dataclass(frozen=True)
class _Keys(KeyRange):
    """Some jobs by their keys, whose messages are compared."""

    spec: QueueSpec | None = None
    keys: Sequence[Key] = ()

    def holds(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is one of these."""
        if self.spec is None:
            return sa.true()
        return self.spec.key_in(columns, self.keys)


def put_back(spec: QueueSpec, held: ClaimedJobs) -> Verb | None:
    """Return the statement that lets jobs wait again, and returns their keys; None where such a commit takes nothing.

    A job that waits, or that somebody holds, is left alone: then the claim was rolled back, or it is mended already.
    """
    if isinstance(spec.strategy, OwnMessage):
        return rows_again(spec, held)
    keys = [key for _, listed in held.claims if not isinstance(listed, sa.BindParameter) for key in listed]
    return spec.strategy.reconcile_range(spec, _Keys(spec=spec, keys=keys))
