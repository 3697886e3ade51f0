"""Settling runs in bulk: what has ended without a commit of its own, as it is taken from the crew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import exc

from sqlaqueue.consumer.context import Shift
from sqlaqueue.consumer.core.effects import Beside, Script
from sqlaqueue.consumer.core.transient_errors import is_lock_or_timeout, may_settle_later
from sqlaqueue.consumer.settling import settle
from sqlaqueue.consumer.settling.outcomes import Ended
from sqlaqueue.keys import key_text, key_value
from sqlaqueue.log import logger


def settle_finished(shift: Shift, *, wait: bool = True) -> Script:
    """Settle what has ended, together; if that cannot be done, one by one, and give up what cannot be settled at all.

    :param wait: whether to wait for rows that somebody has locked.
    """
    crew = shift.crew
    finished = crew.take_finished()
    if not finished:
        return
    stuck: list[Ended] = []
    later: list[Ended] = []
    try:
        try:
            lost = yield Beside(partial(settle.settle_and_commit, wait=wait), (shift.plan, finished))
        except exc.DBAPIError as error:
            if may_settle_later(error) and not is_lock_or_timeout(error):
                raise
            lost, stuck, later = yield Beside(partial(settle.settle_each, wait=wait), (shift.plan, finished))
    except Exception:
        crew.give_back(finished)
        raise
    _settled(shift, finished, lost, stuck, later)


def settle_postponed(shift: Shift, *, last: bool = False) -> Script:
    """Settle some of those whose rows were held, each by itself.

    :param last: whether there is no further try, so that all of them are tried.
    """
    crew = shift.crew
    while ended := crew.postponed.take():
        try:
            lost, stuck, later = yield Beside(partial(settle.settle_each, wait=False), (shift.plan, ended))
        except Exception:
            crew.postponed.add(ended)
            raise
        if last:
            stuck, later = [*stuck, *later], []
        _settled(shift, ended, lost, stuck, later)
        if not last:
            return


def _settled(
    shift: Shift, ended: Sequence[Ended], lost: Sequence[Ended], stuck: Sequence[Ended], later: Sequence[Ended]
) -> None:
    for one in stuck:
        extra = shift.fields("not_settled", job_key=key_value(one.run.key), attempt=one.run.attempt)
        text = "%s: job %s stays as it is until its lease expires"
        logger.error(text, shift.name, key_text(one.run.key), extra=extra)
    if later:
        shift.crew.postponed.add(later)
    shift.crew.settled([one for one in ended if one not in later] if later else ended, lost, stuck)
