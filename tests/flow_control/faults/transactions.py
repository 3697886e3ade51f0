"""The rows of the audit, as changes of jobs, runs and snapshots. Pure, no I/O."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from typing import Any

from tests.flow_control.faults.configuration import Configuration


@dataclass(frozen=True)
class Snapshot:
    """Which transactions were committed at a moment."""

    least: int
    next: int
    in_progress: frozenset[int]

    def shows(self, xid: int) -> bool:
        """Return whether a transaction that is known to be committed had been committed then."""
        return xid < self.least or (xid < self.next and xid not in self.in_progress)


@cache
def snapshot(text: str) -> Snapshot:
    """Return a ``pg_snapshot`` from its text."""
    least, following, some = text.split(":")
    return Snapshot(int(least), int(following), frozenset(map(int, some.split(","))) if some else frozenset())


@dataclass(frozen=True)
class Commit:
    """The end of a transaction."""

    seen: Snapshot
    at: float


class Change:
    """A committed change of one job."""

    def __init__(self, row: Any, commit: Commit) -> None:
        self.seq, self.xid, self.began, self.at, self.origin = row.seq, row.xid, row.began, row.at, row.origin
        self.seen, self.commit = snapshot(row.seen), commit
        self.before, self.after = row.before, row.after
        values = row.after or row.before
        self.job, self.customer, self.document = values["id"], values["customer_id"], values["document_id"]
        self.kind, self.most, self.priority = values["kind"], values["most"], values["priority"]
        self.old, self.new = (row and row.get("status", "pending") for row in (self.before, self.after))

    @property
    def begins(self) -> bool:
        return self.new == "processing" and self.old != "processing"

    @property
    def ends(self) -> bool:
        return self.old == "processing" and self.new != "processing"

    @property
    def token(self) -> str | None:
        """The token of the run that begins or ends."""
        return (self.after if self.begins else self.before)["lease_token"]

    @cached_property
    def due(self) -> float:
        """When the job is due, in epoch seconds."""
        return datetime.fromisoformat(self.after["run_at"]).timestamp()

    @property
    def begun(self) -> bool:
        return self.after["started_at"] is not None

    def sees(self, other: Change, *, at_commit: bool = False) -> bool:
        """Return whether the statement of this change, or the end of its transaction, saw another change."""
        if other.xid == self.xid:
            return other.seq < self.seq
        return (self.commit.seen if at_commit else self.seen).shows(other.xid)

    def __str__(self) -> str:
        return f"{self.at % 1000:.4f} {self.origin} job {self.job} {self.old}->{self.new} xid {self.xid}"


@dataclass
class Run:
    """A run of a job: from the change that began it to the one that ended it."""

    begin: Change
    end: Change | None = None


class Hold:
    """What the function of a held strategy has admitted."""

    def __init__(self, xid: int, text: str) -> None:
        values = json.loads(text)
        self.xid, self.job, self.at, self.began = xid, values["job"], values["at"], values["began"]
        self.before, self.after = snapshot(values["before"]), snapshot(values["after"])
        self.started = values["started"]
        each = zip(values["limits"], values["keys"], values["most"], strict=True)
        self.slots = [((name, key), most) for name, key, most in each if key is not None and most is not None]
        """The keys with a limit, and the limits."""

    def __str__(self) -> str:
        return f"{self.at % 1000:.4f} job {self.job} of {self.xid}"


class Mark:
    """The beginning of a call of a handler in the transaction that holds the job."""

    def __init__(self, row: Any) -> None:
        self.job, self.xid, self.origin, self.at, self.began = (
            row.job,
            row.xid,
            row.origin,
            row.at,
            row.transaction_began,
        )
        self.seen, self.holds = snapshot(row.seen), row.holds

    def __str__(self) -> str:
        return f"{self.at % 1000:.4f} {self.origin} job {self.job} of {self.xid}"


class Audit:
    """All that was recorded in a round.

    :param rows: what :func:`tests.flow_control.faults.audit.read` returns.
    :param hashes: the hash of the key of each customer.
    :param handlers: the records of handlers and of the test, in the order of time.
    """

    def __init__(
        self,
        configuration: Configuration,
        rows: Mapping[str, list[Any]],
        hashes: Mapping[int, int],
        handlers: list[Any],
    ) -> None:
        self.configuration, self.hashes, self.handlers, self.rows = configuration, hashes, handlers, rows
        commits = {row.xid: Commit(snapshot(row.seen), row.at) for row in rows["committed"]}
        self.changes = [Change(row, commits[row.xid]) for row in rows["change"]]
        self.by_job: dict[int, list[Change]] = defaultdict(list)
        for change in self.changes:
            self.by_job[change.job].append(change)
        self.runs: list[Run] = []
        for changes in self.by_job.values():
            for change in changes:
                if change.begins:
                    self.runs.append(Run(change))
                elif change.ends:
                    self.runs[-1].end = change
        self.begins = sorted((run.begin for run in self.runs), key=lambda change: (change.commit.at, change.seq))
        self.marks = [Mark(row) for row in rows["mark"]]
        texts = {(mark.xid, text) for mark in self.marks for text in mark.holds.splitlines()}
        self.holds = [Hold(xid, text) for xid, text in texts]
        self.limit_changes = [(row.after["id"], row.after["most"], row.xid) for row in rows["limit_change"]]
        self.rate_changes = [(row, commits[row.xid]) for row in rows["rate_change"]]

    def limit(self, kind: str, change: Change) -> tuple[Any, int | None]:
        """Return the key of a job in a limit, None if it has none, and the limit that the statement saw."""
        config, customer = self.configuration, change.customer
        match kind:
            case "number":
                return customer, config.most
            case "attribute":
                return customer, change.most
            case "queue":
                return "all", config.most_of_queue
            case "pair":
                return None if customer is None else (customer, change.kind), config.most
        seen = [most for tenant, most, xid in self._of_tenant[customer] if change.seen.shows(xid)]
        return customer, seen[-1] if seen else None

    def before(self, job: int, document: int | None) -> Iterator[list[Change]]:
        """Yield the changes of each job that comes before a job in the order of its document, the first one first."""
        for earlier in self._of_document[document] if document is not None else ():
            if earlier >= job:
                return
            yield self.by_job[earlier]

    def behind_failed(self) -> Iterator[tuple[Change, list[Change]]]:
        """Yield each failure of a job of a document, with the changes of each job behind it."""
        for failed in self.changes:
            if failed.new == "failed" and failed.old != "failed" and failed.document is not None:
                for job in self._of_document[failed.document]:
                    if job > failed.job:
                        yield failed, self.by_job[job]

    @cached_property
    def _of_document(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for job, changes in sorted(self.by_job.items()):
            if changes[0].document is not None:
                found[changes[0].document].append(job)
        return found

    @cached_property
    def _of_tenant(self) -> dict[Any, list[tuple[int, int | None, int]]]:
        found: dict[Any, list[tuple[int, int | None, int]]] = defaultdict(list)
        for one in self.limit_changes:
            found[one[0]].append(one)
        return found
