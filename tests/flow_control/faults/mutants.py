"""Safeguards of flow control that are removed, to show that the checker detects each loss.

Most are functions in the database, replaced by ones without the safeguard; the others are changed in the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from sqlaqueue.consumer import held
from sqlaqueue.consumer.claim import NOTHING, HeldBack
from sqlaqueue.flow_control.turns import Turns


@dataclass(frozen=True)
class Replacement:
    """A change of a function in the database: each text is replaced by the other one."""

    prefix: str
    """How the names of the functions begin."""
    texts: Mapping[str, str]


_LOCK = "IF NOT pg_catalog.pg_try_advisory_xact_lock("
_UNLOCKED = {_LOCK: f"IF false AND {_LOCK.removeprefix('IF ')}"}
_CAPACITY, _HEAD, _RATE = "sqlaqueue_capacity_", "sqlaqueue_head_", "sqlaqueue_rate_capacity"
_HOLD = "sqlaqueue_hold_"

IN_DATABASE: Mapping[str, Replacement] = {
    "limit without a lock": Replacement(_CAPACITY, _UNLOCKED),
    "limit always one more": Replacement(
        _CAPACITY, {"IF sqlaqueue_free <= 0 THEN": "IF false THEN", "RETURN sqlaqueue_free;": "RETURN 1;"}
    ),
    "limit counts in the snapshot of the statement": Replacement(
        _CAPACITY, {"LANGUAGE plpgsql": "LANGUAGE plpgsql STABLE"}
    ),
    "limit without the claim's own jobs": Replacement(
        _CAPACITY, {":= sqlaqueue_free - (": ":= sqlaqueue_free - 0 * ("}
    ),
    "order without a lock": Replacement(_HEAD, _UNLOCKED),
    "order is not checked": Replacement(
        _HEAD,
        {
            "IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job": "IF false",
            "RETURN sqlaqueue_first;": "RETURN sqlaqueue_job;",
        },
    ),
    "order does not see running jobs": Replacement(_HEAD, {"OR EXISTS (": "OR false AND EXISTS ("}),
    "order does not see failed jobs": Replacement(_HEAD, {" OR status = 'failed'": ""}),
    "order does not see begun jobs": Replacement(_HEAD, {"started_at IS NOT NULL OR ": ""}),
    "a failed job cancels nothing": Replacement("sqlaqueue_order_", {"WHERE ": "WHERE false AND "}),
    "rate without a lock": Replacement(_RATE, _UNLOCKED),
    "rate always has its burst": Replacement(
        _RATE, {"IF sqlaqueue_free <= 0 THEN": "IF false THEN", "RETURN sqlaqueue_free;": "RETURN sqlaqueue_burst;"}
    ),
    "rate is not held back": Replacement(_RATE, {"IF sqlaqueue_until >": "IF false AND sqlaqueue_until >"}),
    "a slot without a lock": Replacement(
        _HOLD, {"pg_catalog.pg_try_advisory_xact_lock(sqlaqueue_slot | sqlaqueue_try)": "true"}
    ),
    "one slot more": Replacement(_HOLD, {"- 1 LOOP": "LOOP"}),
    "the slots of a changing limit are not counted": Replacement(
        _HOLD, {"IF sqlaqueue_taken AND sqlaqueue_changing[i] THEN": "IF false THEN"}
    ),
    "the head is not looked for": Replacement(
        _HOLD, {"IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job THEN": "IF false THEN"}
    ),
    "no notification of free places": Replacement("sqlaqueue_freed_", {"BEGIN\n": "BEGIN\n  RETURN NULL;\n"}),
}


def _forget_turns() -> None:
    Turns.claimed = lambda *_: None  # type: ignore[method-assign]  # the mutation


def _reserve_nothing() -> None:
    held.reserve_rates = lambda _, __, keys: set(keys)  # type: ignore[assignment]  # the mutation


def _forget_that_jobs_wait() -> None:
    # The Consumer that ends a run would look for the jobs that wait for its place.
    HeldBack.of = classmethod(lambda *_: NOTHING)  # type: ignore[method-assign,assignment]  # the mutation


IN_WORKERS: Mapping[str | None, Callable[[], None]] = {
    "no notification of free places": _forget_that_jobs_wait,
    "turns are forgotten": _forget_turns,
    "beginnings are not reserved": _reserve_nothing,
}


def replace_functions(engine: sa.Engine, mutant: str) -> None:
    """Replace the functions that a mutant changes."""
    replacement = IN_DATABASE[mutant]
    with engine.begin() as connection:
        statement = "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE starts_with(proname, :prefix)"
        found = connection.scalars(sa.text(statement), {"prefix": replacement.prefix}).all()
        assert found, f"{mutant}: no function {replacement.prefix}..."
        for text in found:
            changed = text
            for old, new in replacement.texts.items():
                assert old in changed, f"{mutant}: {old!r} is not in {changed}"
                changed = changed.replace(old, new)
            # A percent sign would be a parameter of the driver.
            connection.exec_driver_sql(changed.replace("%", "%%"))
