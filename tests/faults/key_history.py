"""The history of a queue under flow control: what was committed, and which jobs transactions have held.

Triggers write each change of a job, of a limit and of a rate into tables. A row of ``change`` tells what its statement
saw (``seen``, the snapshot of the statement, which a STABLE function can ask for) and which transaction wrote it
(``xid``). A deferred trigger writes the row of ``committed`` at the end of each transaction, with a snapshot of that
moment. Two rows are then compared by what a snapshot shows, not by clocks:

* Transaction B saw the commit of A if and only if A's ``xid`` is visible in B's snapshot. So whether a run had ended
  when another one began is exact.
* Two transactions that did not see each other are ordered by ``committed.at``. A claim keeps its locks until it is
  committed, so of two claims of one key the second one must see the first one.

No lock is added: locks of the triggers would serialize what is to be tested, and could deadlock with it. Rows of a
transaction that is rolled back vanish with it.

Under strategies whose transaction holds the jobs, no row tells that such a job runs:

* ``hold()``, the function that locks a job with its slots, also stores in a setting of the transaction what it has
  admitted: the keys, the limits, and the snapshots before and after. The handler reads the setting.
* Each call of a handler writes a row of ``mark`` by a second connection, in autocommit, with the transaction of the
  claim and a snapshot. The transaction has its slots for as long as snapshots show it in progress. So the end of a run
  needs no record, and a worker that was killed is no special case: its run ends when the server ends the transaction.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tests.faults.history import Record
from tests.faults.mutants import replace_functions

if TYPE_CHECKING:
    from tests.faults.key_queues import Configuration

_SEEN = """
CREATE FUNCTION audit_seen() RETURNS trigger STABLE LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('audit.seen', pg_current_snapshot()::text, true);
  PERFORM set_config('audit.began', extract(epoch FROM statement_timestamp())::text, true);
  RETURN NULL;
END $$;
CREATE TABLE committed (xid bigint PRIMARY KEY, seen text, at double precision);
CREATE FUNCTION audit_committed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO committed
    VALUES (pg_current_xact_id()::text::bigint, pg_current_snapshot()::text, extract(epoch FROM clock_timestamp()))
    ON CONFLICT DO NOTHING;
  RETURN NULL;
END $$;
"""

_TABLE = """
CREATE TABLE {record} (
  seq bigserial PRIMARY KEY,
  op text, before jsonb, after jsonb,
  xid bigint DEFAULT pg_current_xact_id()::text::bigint,
  seen text DEFAULT current_setting('audit.seen'),
  began double precision DEFAULT current_setting('audit.began')::float8,
  at double precision DEFAULT extract(epoch FROM clock_timestamp()),
  origin text DEFAULT current_setting('application_name')
);
CREATE CONSTRAINT TRIGGER audit AFTER INSERT ON {record} DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION audit_committed();
CREATE FUNCTION audit_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO {record} (op, before, after) VALUES (TG_OP, to_jsonb(OLD), to_jsonb(NEW));
  RETURN NULL;
END $$;
-- In the order of their names, and before those of the library, which may change further rows.
CREATE TRIGGER audit_1 AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION audit_seen();
CREATE TRIGGER audit_2 AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION audit_{table}();
"""

RECORDS = {
    "job": "change",
    "tenant": "limit_change",
    "sqlaqueue_rate": "rate_change",
    "sqlaqueue_dead_letter": "letter_change",
}
"""The tables whose changes are recorded, and the tables of the records."""

APPLICATION = "marks"
"""The ``application_name`` of the connections that write marks; no fault ends them."""

_MARK = """
CREATE TABLE mark (
  seq bigserial PRIMARY KEY,
  job bigint, call text, xid bigint, transaction_began double precision, holds text, origin text,
  seen text DEFAULT pg_current_snapshot()::text,
  at double precision DEFAULT extract(epoch FROM clock_timestamp())
)
"""

_BEFORE = (
    "DECLARE\n  audit_seen text := pg_current_snapshot()::text;\n  audit_started timestamptz := clock_timestamp();\n"
)
_AFTER = """    PERFORM set_config('audit.holds', concat(current_setting('audit.holds', true), json_build_object(
      'job', sqlaqueue_job::json->0, 'limits', sqlaqueue_limits, 'keys', sqlaqueue_keys, 'most', sqlaqueue_most,
      'before', audit_seen, 'after', pg_current_snapshot(), 'began', extract(epoch FROM statement_timestamp()),
      'started', extract(epoch FROM audit_started), 'at', extract(epoch FROM clock_timestamp())), E'\\n'), true);
    RETURN true;
"""

_READ = sa.text("""
    SELECT pg_current_xact_id()::text::bigint AS xid, extract(epoch FROM now())::float8 AS transaction_began,
      coalesce(current_setting('audit.holds', true), '') AS holds
""")
_WRITE = sa.text("""
    INSERT INTO mark (job, call, xid, transaction_began, holds, origin)
    VALUES (:job, :call, :xid, :transaction_began, :holds, :origin)
""")


def install(engine: sa.Engine, *, held: bool) -> None:
    """Create the triggers and their tables in a database with the tables of a round.

    :param held: whether transactions hold the jobs.
    """
    with engine.begin() as connection:
        # Without parameters, as the statements have percent signs of their own.
        connection.exec_driver_sql(_SEEN)
        for table, record in RECORDS.items():
            if sa.inspect(connection).has_table(table):
                connection.exec_driver_sql(_TABLE.format(table=table, record=record))
        if held:
            connection.exec_driver_sql(_MARK)
            texts = {"DECLARE\n": _BEFORE, "    RETURN true;\n": _AFTER}
            replace_functions(connection, "sqlaqueue_hold_", texts, once=True)


def read(engine: sa.Engine) -> dict[str, list[Any]]:
    """Return the rows of all records and of ``committed``, and the final rows of jobs and effects."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        present = sa.inspect(connection).get_table_names()
        order = dict.fromkeys(RECORDS.values(), "seq") | {"committed": "at", "job": "id", "effect": "id", "mark": "seq"}
        return {
            name: list(connection.execute(sa.text(f"SELECT * FROM {name} ORDER BY {key}"))) if name in present else []
            for name, key in order.items()
        }


class Marks:
    """Writes the marks of one process, by a connection of its own."""

    def __init__(self, url: str, origin: str) -> None:
        self._engine = sa.create_engine(
            url, isolation_level="AUTOCOMMIT", pool_size=1, connect_args={"application_name": APPLICATION}
        )
        self._origin, self._lock = origin, threading.Lock()

    async def write(self, io: Any, job: int, call: str) -> None:
        """Record that a call of a handler begins.

        :param io: the session of the handler, in the transaction that holds the job.
        """
        held = (await io.execute(_READ)).one()
        with self._lock, self._engine.connect() as connection:
            connection.execute(_WRITE, {**held._mapping, "job": job, "call": call, "origin": self._origin})


# -- what the rows tell ------------------------------------------------------------------------------------------------


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
    least, following, some = text.split(":")
    return Snapshot(int(least), int(following), frozenset(map(int, some.split(","))) if some else frozenset())


@dataclass(frozen=True)
class Commit:
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
        return (self.after if self.begins else self.before)["lease_token"]

    @cached_property
    def due(self) -> float:
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

    def saw_at_first(self, change: Change) -> bool:
        """Return whether the function could see a change when it began."""
        return self.before.shows(change.xid)

    def saw_at_last(self, change: Change) -> bool:
        """Return whether it could see a change of another transaction when it ended."""
        return change.xid != self.xid and self.after.shows(change.xid)

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

    :param rows: what :func:`read` returns.
    :param hashes: the hash of the key of each customer.
    :param handlers: the records of handlers and of the test, in the order of time.
    """

    def __init__(
        self,
        configuration: Configuration,
        rows: Mapping[str, list[Any]],
        hashes: Mapping[int, int],
        handlers: list[Record],
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
