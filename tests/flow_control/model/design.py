"""What is checked: a design of the claim, and the bounds within which every interleaving is visited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal[
    "complete",
    "retry",
    "retry later",
    "fall due",
    "rescue",
    "cancel",
    "requeue",
    "change limit",
    "plain start",
    "roll back",
    "time out",
]

UNLIMITED = 9
"""The limit of a key without one."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """The choices of which each makes the claim correct; the defaults are the design of the library."""

    count: Literal["fresh", "statement"] = "fresh"
    """The snapshot that counts the running jobs of a key: a fresh one, or that of the claim's statement."""
    head: Literal["fresh", "statement", "first unlocked", "first due"] = "fresh"
    """The job of an ordered key that may run: the first unfinished one by a fresh snapshot, or by that of the claim's
    statement, or the first pending job of which the row is not locked, or the first unfinished one that is due."""
    head_waits_for_running: bool = True
    """Whether the head of an ordered key is left alone while another job of the key runs."""
    key_lock: Literal["before look", "after look", "none"] = "before look"
    """When the advisory lock of a key is tried."""
    locks_unlimited_keys: bool = False
    """Whether a claim takes the advisory lock of a key without a limit as well."""
    locks_rows: Literal["after all looks", "after each look"] = "after all looks"
    """When the rows of a key are locked: once all keys are looked at, or before the next key is."""
    unlocks_before_commit: bool = False
    """Whether the advisory locks end with the statement instead of the transaction."""
    counter: bool = False
    """Whether a stored counter replaces the count of running jobs; each settle takes one off."""
    fenced: bool = True
    """Whether a settle compares its token with that of the row."""
    reports_contention: bool = True
    """Whether a claim that was refused an advisory lock tells its worker to look again."""
    reports_locked_rows: bool = False
    """Whether a claim that skipped a locked row tells its worker to look again."""
    limit_first: bool = False
    """Whether the batch is cut off before the keys without a free slot are left out."""
    requeue_locks_key: bool = False
    """Whether a requeue waits for the advisory lock of the key."""
    silent: tuple[Operation, ...] = ()
    """The operations that send no notification."""


DESIGN = Design()
"""The design of the library."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The bounds of a search."""

    keys: tuple[int, ...]
    """The key of each job, in the order of the jobs' numbers."""
    initial: str = ""
    """The first status of each job, a letter each: (p)ending, (r)unning, (d)elayed, (f)inished; by default pending."""
    ordered: frozenset[int] = frozenset()
    """The keys of which the jobs run in strict order."""
    limits: tuple[int, ...] = (1, 1)
    """The limit of each key in its table at the beginning."""
    limit_values: tuple[int, ...] = (1, 2)
    """The limits that the table may get."""
    versions: tuple[int, ...] = (0, 0)
    """The limit that the configuration of each worker contains, or 0 if it reads the table."""
    operations: tuple[Operation, ...] = ()
    """What may happen beside the claims, at any time and any number of times."""
    batch: int = UNLIMITED
    """The most jobs a claim admits."""
    wakeups: bool = False
    """Whether it is recorded which workers will look again, so that a lost wake-up is found."""
    strict_requeue: bool = False
    """Whether a claim may not pass over a job that was requeued while the claim was in flight."""


@dataclass(frozen=True)
class Model:
    """A design within a scope."""

    design: Design
    scope: Scope

    @property
    def count_of_keys(self) -> int:
        """The number of keys."""
        return max(self.scope.keys) + 1
