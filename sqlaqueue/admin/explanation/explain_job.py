"""Say why a job does not run, or would not be enqueued: :func:`explain_job`."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.explanation.new_instance import reasons_of_new
from sqlaqueue.admin.explanation.read_facts import read_facts
from sqlaqueue.admin.explanation.reasons import reasons_of
from sqlaqueue.admin.explanation.result import MISSING, NEW, Explanation
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import key_value
from sqlaqueue.write_routing import routing_to_primary


@requires_session
def explain_job(session: Session, job_or_model: Any, key: Any = None) -> Explanation:
    """Say why a job does not run, or why a new instance would not be enqueued.

    It changes nothing: it does not flush the session, adds no instance to it, and keeps no lock. For a moment it locks
    a pending job, to find out whether another transaction has.

    :param job_or_model: an instance that is in the database; a queue class, with ``key``; or a new instance, which is
        not added to a session, to learn whether a twin of it exists, see :class:`~sqlaqueue.Unique`.
    :param key: the primary key of a job of the class: a value, or a tuple for a composite key; a text is converted by
        the database.
    :raises NotAQueueError: for anything else than a queue class or an instance of one.
    :raises StatementError: for a class without a key, an instance with one, and an instance that waits for a flush.
    """
    with session.no_autoflush, routing_to_primary(session):
        if not isinstance(job_or_model, QueueMixin):
            spec = spec_of(job_or_model)
            if key is None:
                name = spec.model.__name__
                msg = f"explain_job({name}): give the key of the job as well, as in explain_job(session, {name}, 5)"
                raise StatementError(msg)
            return _explain(session, job_or_model, key)
        return _explain_instance(session, job_or_model, key)


def _explain_instance(session: Session, job: Any, key: Any) -> Explanation:
    name, state = type(job).__name__, sa.inspect(job)
    spec = spec_of(type(job))
    if key is not None:
        msg = f"explain_job({name}(...), key={key!r}): an instance has its key; give the class {name}, or leave out key"
        raise StatementError(msg)
    if state.key is not None:
        run = run_of(job)
        here = run is not None and run.transaction is not None and run.transaction is session.get_transaction()
        # The class of the queue: no statement selects a subclass with a table of its own.
        return _explain(session, spec.model, tuple(state.identity), claimed_here=here)
    if state.session is not None:
        msg = (
            f"explain_job(): this {name} waits in a session to be inserted; flush the session, or do not add the "
            "instance to it"
        )
        raise StatementError(msg)
    return Explanation(queue=spec.name, key=None, state=NEW, reasons=reasons_of_new(session, job))


def _explain(session: Session, model: type[Any], key: Any, *, claimed_here: bool = False) -> Explanation:
    facts = read_facts(session, model, key, claimed_here=claimed_here)
    shown = key_value(facts.info.key) if facts.info is not None else key_value(key) if isinstance(key, tuple) else key
    return Explanation(queue=facts.spec.name, key=shown, state=facts.state or MISSING, reasons=reasons_of(facts))
