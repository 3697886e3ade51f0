"""Settling runs in bulk: what has ended without a commit of its own, as it is taken from the crew."""

from __future__ import annotations

from functools import partial

from sqlalchemy import exc

from sqlaqueue.log import key_text, logger, plain_key
from sqlaqueue.serving import ending
from sqlaqueue.serving.errors import settles_later
from sqlaqueue.serving.outcomes import Ended
from sqlaqueue.serving.shift import Shift
from sqlaqueue.serving.steps import Beside, Script


def settle_finished(shift: Shift, *, wait: bool = True) -> Script:
    """Settle what has ended, together; if that cannot be done, one by one, and give up what cannot be settled at all.

    :param wait: whether to wait for rows that somebody has locked.
    """
    crew = shift.crew
    finished = crew.take_finished()
    if not finished:
        return
    stuck: list[Ended] = []
    try:
        try:
            lost = yield Beside(partial(ending.settle_and_commit, wait=wait), (shift.plan, finished))
        except exc.DBAPIError as error:
            if settles_later(error):
                raise
            lost, stuck = yield Beside(partial(ending.settle_each, wait=wait), (shift.plan, finished))
    except Exception:
        crew.give_back(finished)
        raise
    for one in stuck:
        extra = shift.fields("not_settled", job_key=plain_key(one.run.key), attempt=one.run.attempt)
        text = "%s: job %s stays as it is until its lease expires"
        logger.error(text, shift.name, key_text(one.run.key), extra=extra)
    crew.settled(finished, lost, stuck)
