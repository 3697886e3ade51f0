"""Routines that settle finished runs in bulk: those that have no commit of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_lock_or_timeout, may_be_of_a_run
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.report import report_settled
from sqlaqueue.consumer.settling.outcomes import FinishedRun
from sqlaqueue.consumer.settling.settle import MOMENT, SettledEach
from sqlaqueue.log import logger
from sqlaqueue.queue.run import key_text, key_value


def settle_finished(context: ConsumerContext, *, wait: bool = True) -> Routine:
    """Settle finished runs together; if that fails, one by one, and give up those that cannot be settled at all.

    :param wait: whether to wait for rows that another transaction has locked.
    """
    finished = context.completions.take()
    if not finished:
        return
    settler, result = context.settler, SettledEach([], [], [])
    try:
        try:
            settle = partial(settler.settle_and_commit, lock_timeout=None if wait else MOMENT)
            lost = yield ExecuteInOwnSession(settle, (finished,))
            result = result._replace(lease_lost=lost)
        except Exception as error:
            if not (may_be_of_a_run(error) or is_lock_or_timeout(error)):
                raise
            result = yield ExecuteInOwnSession(partial(settler.settle_each, wait=wait), (finished,))
    except Exception:
        context.completions.put_back(finished)
        raise
    _report(context, finished, result)


def settle_postponed(context: ConsumerContext, *, last: bool = False) -> Routine:
    """Settle some of the runs whose rows were locked, each by itself.

    :param last: whether there is no further try, so that all of them are tried.
    """
    postponed = context.completions.postponed
    while finished := postponed.take():
        try:
            settle = partial(context.settler.settle_each, wait=False)
            result: SettledEach = yield ExecuteInOwnSession(settle, (finished,))
        except Exception:
            postponed.add(finished)
            raise
        if last:
            result = SettledEach(result.lease_lost, [*result.refused, *result.later], [])
        _report(context, finished, result)
        if not last:
            return


def _report(context: ConsumerContext, finished: Sequence[FinishedRun], result: SettledEach) -> None:
    for one in result.refused:
        extra = context.log_fields("not_settled", job_key=key_value(one.run.key), attempt=one.run.attempt)
        text = "%s: job %s could not be settled and stays as it is until its lease expires"
        logger.error(text, context.name, key_text(one.run.key), extra=extra)
    if result.later:
        context.completions.postponed.add(result.later)
        finished = [one for one in finished if one not in result.later]
    report_settled(context, finished, result.lease_lost, result.refused)
