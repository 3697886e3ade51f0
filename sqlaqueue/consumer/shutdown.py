"""The routine that ends a run: settle what has ended, release what was claimed and has not."""

from __future__ import annotations

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.held import discard_entries
from sqlaqueue.consumer.executing.report import release
from sqlaqueue.consumer.executing.settle_finished import settle_finished, settle_postponed
from sqlaqueue.consumer.maintenance.heartbeat import deregister
from sqlaqueue.log import logger


def shut_down(context: ConsumerContext) -> Routine:
    """Settle finished runs, release the others, and deregister; the workers have ended, or are abandoned."""
    if context.settings.holds_transaction:
        # Their transactions end when their handlers do, or the process; these jobs must not look as if they had killed
        # it.
        context.journal.discard_all()
    else:
        release(context, context.forget_claimed())
    steps = [discard_entries(context), settle_finished(context, wait=False), settle_postponed(context, last=True)]
    if context.registered:
        steps.append(_deregister(context))
    for step in steps:
        try:
            yield from step
        except Exception:
            logger.exception(
                "%s: could not settle at the end; the jobs run again when their leases have expired",
                context.name,
                extra=context.log_fields("not_settled"),
            )


def _deregister(context: ConsumerContext) -> Routine:
    yield ExecuteInOwnSession(deregister, (context,))
