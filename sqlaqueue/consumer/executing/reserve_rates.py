"""Reserves the beginnings of jobs with their rates, where the claim's transaction holds the jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.configuration.statements import KEYS
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.queue.names import BEGUN
from sqlaqueue.queue.run import Key


def reserve_rates(session: Session, context: ConsumerContext, keys: Sequence[Key]) -> set[Key]:
    """Reserve the beginnings of claimed jobs in a transaction of its own, and leave the commit to the caller.

    Two claims may have seen the same room, so fewer jobs may begin than were claimed. If the worker dies before they
    begin, the beginnings are lost: their keys then begin later than their rates allow, never earlier.

    :return: the keys of the jobs that may begin.
    """
    spec, statements = context.spec, context.statements.reserve
    if statements is None:
        return set(keys)
    context.isolation.begin(session)
    select, records = statements
    bind = context.settings.bind_arguments
    found = session.execute(select, {KEYS: spec.bind_keys(keys)}, bind_arguments=bind).all()
    rates = {tuple(row[: len(spec.keys)]): list(_pairs(row[len(spec.keys) :])) for row in found}
    begun: list[list[int]] = [[] for _ in records]
    taken: Counter[tuple[int, int]] = Counter()
    admitted: set[Key] = set()
    for key in keys:
        # A job that is missing was deleted by plain SQL; its settlement finds out.
        pairs = enumerate(rates.get(key, ()))
        concerned = [(number, hashed, room) for number, (hashed, room) in pairs if room is not None]
        if all(room > taken[number, hashed] for number, hashed, room in concerned):
            admitted.add(key)
            for number, hashed, _ in concerned:
                taken[number, hashed] += 1
                begun[number].append(hashed)
    for hashes, record in zip(begun, records, strict=True):
        if hashes:
            session.execute(record, {BEGUN: hashes}, bind_arguments=bind)
    return admitted


def _pairs(values: Sequence[Any]) -> zip[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)
