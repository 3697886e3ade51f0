"""Flow control in steps: the jobs that a claim takes, the first ones that no limit, rate or order blocks.

PostgreSQL locks keys and counts within one statement. Here a claim reads candidates in claim order, and counts in
Python. On a database with one writer nothing else can change meanwhile. On another one it looks first, locks the keys
in which a place seems to be free (:meth:`~sqlaqueue.sql.engine.OtherEngine.lock_keys`), and then counts again: under
READ COMMITTED a statement sees what was committed before it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.checks import Check, LimitCheck, OrderCheck, RateCheck, checks_of
from sqlaqueue.flow_control.keys import KeyOrder, flow_control
from sqlaqueue.flow_control.turns import turns_of
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimRequest
from sqlaqueue.sql.engine import OtherEngine
from sqlaqueue.sql.portable import clock
from sqlaqueue.sql.types import insert_or_replace, numbered_rows
from sqlaqueue.strategies.columns import by_index

_MOST_EXCLUDED = 10_000
"""How many full keys a query leaves out in all; the jobs of others are left out when they have been read."""

_WINDOW, _CHOSEN, _FULL = "sqlaqueue_window", "sqlaqueue_chosen", "sqlaqueue_full"
"""The names of parameters: the number of jobs to read; the keys of those to read again; the prefix of full keys."""
_LEVEL, _TURN, _WEIGHT = "sqlaqueue_level", "sqlaqueue_turn", "sqlaqueue_weight"

Given = Mapping[str, Any]


class Admission:
    """The statements of a claim under flow control, built once.

    :param waiting: a SELECT of the keys of pending jobs.
    """

    def __init__(self, engine: OtherEngine, request: ClaimRequest, waiting: AnySelect) -> None:
        flow = flow_control(request.spec)
        assert flow is not None  # noqa: S101 - only made for queues with flow control
        self.engine, self.spec, self.flow, self.request = engine, request.spec, flow, request
        self.checks = checks_of(flow)
        spec = self.spec
        run_at = spec.columns.get("run_at")
        of_checks = [column for check in self.checks for column in check.columns]
        weight = [] if flow.turn is None else [flow.turn.weight.label(_WEIGHT)]
        rows = waiting.add_columns(*of_checks, *weight).where(*spec.due(run_at))
        if flow.order is not None:
            rows = rows.where(_is_head(flow.order))
        if request.scan_range is not None:
            rows = rows.where(request.scan_range([*spec.claim_order]))
        ordered = rows.order_by(*spec.claim_order)
        excluded = [self._excluded(check) for check in self.checks if not isinstance(check, OrderCheck)]
        self.window = ordered.where(*excluded).limit(sa.bindparam(_WINDOW, type_=sa.Integer()))
        chosen = spec.key_in(spec.keys, sa.bindparam(_CHOSEN, (), expanding=len(spec.keys) > 1))
        self.again = engine.locked(by_index(ordered.where(chosen), spec.table, "PRIMARY"))
        self.running = {check.number: _running(check) for check in self.checks if isinstance(check, LimitCheck)}
        self.rates = {check.number: _rate_rows(check) for check in self.checks if isinstance(check, RateCheck)}
        if flow.turn is not None:
            priority = [] if not spec.has("priority") else [spec.columns["priority"].is_not_distinct_from(_level(spec))]
            of_turn = [
                column.is_not_distinct_from(sa.bindparam(f"{_TURN}_{number}", type_=column.type))
                for number, column in enumerate(flow.turn.columns)
            ]
            self.window_of_turn = self.window.where(*priority, *of_turn)
            keys = waiting.with_only_columns(*flow.turn.columns, maintain_column_froms=True).distinct()
            self.turns = keys.where(*priority, *spec.due(run_at), *excluded)
            if spec.has("priority"):
                first = waiting.with_only_columns(spec.columns["priority"], maintain_column_froms=True).distinct()
                self.levels = first.where(*spec.due(run_at)).order_by(spec.columns["priority"])

    def _excluded(self, check: Check) -> sa.ColumnElement[bool]:
        key = check.job_key.of(self.spec.table)
        if not _is_full_for_all(check):
            pairs: sa.BindParameter[Any] = sa.bindparam(f"{_FULL}_{check.number}", (), expanding=True)
            return sa.or_(key.is_(None), check.most.is_(None), sa.tuple_(key, check.most).not_in(pairs))
        full = sa.bindparam(f"{_FULL}_{check.number}", (), sa.BigInteger(), expanding=True)
        return sa.func.coalesce(key, _NO_HASH).not_in(full) if check.job_key.names else key.not_in(full)

    def keys(self, connection: sa.Connection, given: Given) -> list[Key]:
        """Return the keys of the jobs that are admitted, in the order of their beginnings; they are locked."""
        return _Admitting(self, connection, given).run()

    def in_order(self, rows: AnySelect, keys: Sequence[Key]) -> AnySelect:
        """Return the claimed rows in the order in which they were admitted, where keys alternate."""
        if self.flow.turn is None or not keys:
            return rows
        spec = self.spec
        given = {
            f"sqlaqueue_key_{number}": (key.type, [each[number] for each in keys])
            for number, key in enumerate(spec.keys)
        }
        numbered = numbered_rows(given, "sqlaqueue_place")
        same = [key == numbered.c[f"sqlaqueue_key_{number}"] for number, key in enumerate(spec.keys)]
        return rows.where(*same).order_by(None).order_by(numbered.c.sqlaqueue_place)


_NO_HASH = sa.literal_column("-1", sa.BigInteger())
"""Stands for the hash of a key that is NULL; no hash is negative."""


def _level(spec: QueueSpec) -> sa.BindParameter[Any]:
    return sa.bindparam(_LEVEL, type_=spec.columns["priority"].type)


def _is_full_for_all(check: Check) -> bool:
    """Return whether no other job of a key may begin if one may not: jobs of a key may have different limits."""
    if isinstance(check, LimitCheck):
        return isinstance(check.job_key.config.most, int)
    return isinstance(check, RateCheck)


def _is_head(order: KeyOrder) -> sa.ColumnElement[bool]:
    """Return the condition that no job of the key runs, and none before this one is unfinished."""
    spec, table, other = order.spec, order.spec.table, order.spec.table.alias("sqlaqueue_before")
    status = other.c[spec.columns["status"].key]
    started, run_at = other.c[spec.columns["started_at"].key], spec.columns.get("run_at")
    waits = [started.is_not(None), *spec.due(None if run_at is None else other.c[run_at.key])]
    mine, theirs = (sa.tuple_(*(rows.c[column.key] for column in order.by)) for rows in (table, other))
    # One condition for each state: of one with OR, MariaDB looks for an index anew for each row.
    holds_back = [
        [status == spec.literal("processing")],
        [status == spec.literal("pending"), theirs < mine, *([sa.or_(*waits)] if run_at is not None else [])],
    ]
    if order.config.on_failure == "block":
        holds_back.append([status == spec.literal("failed"), theirs < mine])
    same = [other.c[column.key] == column for column in order.columns]
    if any(isinstance(column.type, sa.String) for column in order.columns):
        # By the collation of a column, texts may be equal that are different keys.
        same.append(order.hashed(other) == order.hashed(table))
    one: AnySelect = sa.select(sa.literal_column("1"))
    nothing = [~one.where(*same, *each).correlate(table).exists() for each in holds_back]
    missing = [column.is_(None) for column in order.columns if column.nullable]
    return sa.or_(*missing, sa.and_(*nothing))


def _running(check: Check) -> AnySelect:
    """Return a SELECT of how many jobs of each key run."""
    spec, key = check.spec, check.job_key.of(check.spec.table).label("key")
    running: AnySelect = sa.select(key, sa.func.count()).where(spec.in_state("processing"))
    # A job without a key holds none back, and a NULL among the keys that a query leaves out would leave out all.
    return running.where(check.job_key.of(spec.table).is_not(None)).group_by(key) if check.job_key.names else running


def _rate_rows(check: RateCheck) -> AnySelect:
    rate, table = check.job_key, check.spec.side_tables[RATE]
    mine = [table.c.queue == check.spec.name, table.c.rate == rate.name]
    keys = sa.bindparam(_CHOSEN, (), sa.BigInteger(), expanding=True)
    return sa.select(table.c.key, table.c.next_at, table.c.throttled_until).where(*mine, table.c.key.in_(keys))


class _Candidate(NamedTuple):
    """A job that may be admitted."""

    key: Key
    concerned: list[tuple[Check, int, int | None]]
    """The checks in which it has a key, the hash of that, and how many jobs of the key may run; None for any number."""
    weight: Any
    """How many jobs one turn of its key has, where keys alternate."""


class _Admitting:
    """One claim: what it has counted, and what it has admitted."""

    def __init__(self, statements: Admission, connection: sa.Connection, given: Given) -> None:
        self.statements, self.connection, self.given = statements, connection, given
        self.checks, self.spec = statements.checks, statements.spec
        limit = statements.request.limit
        self.limit = int(given.get(limit.key, limit.value))
        self.admitted: list[Key] = []
        self.examined: set[Key] = set()
        self.tried: set[Key] = set()
        """The jobs that have been chosen, whether they could be locked or not."""
        self.contended: set[str] = set()
        """The names of keys that other claims have locked."""
        self.taken: Counter[tuple[int, int]] = Counter()
        """How many jobs of a key this claim has admitted, by the number of the check and the hash of the key."""
        self.full: dict[int, set[Any]] = {check.number: set() for check in self.checks}
        """The keys without a free place, by the number of the check; each with a limit where those of jobs differ."""
        self.runs: dict[int, dict[int, int]] = {}
        self.begins: dict[int, dict[int, tuple[datetime, bool]]] = {}
        self.now: datetime | None = None
        self.begun_in_turn = False
        """Whether the last turn has admitted a job."""
        self.read = 0
        """How many rows the last query has returned."""

    def run(self) -> list[Key]:
        turn = self.statements.flow.turn
        self._count()
        if turn is None or self.statements.request.few:
            self._take(self.statements.window, {})
        else:
            self._take_turns()
        self._begin_rates()
        return self.admitted

    # -- candidates ----------------------------------------------------------------------------------------------------

    def _take(self, window: AnySelect, of_turn: Given, *, taken: int | None = None) -> int:
        """Admit jobs of a query; return how many more jobs the turn of their key has, of those that it had before.

        :param taken: how many jobs the turn of their key has had already; None for as many jobs as the claim may have.
        """
        target, size, left = self.limit, 4 * self.limit + 64, 0
        while len(self.admitted) < target:
            jobs = self._candidates(window, {**of_turn, **self._known_full(), _WINDOW: size})
            is_last = self.read < size
            if taken is not None and jobs:
                left = max(max(jobs[0].weight or 1, 1) - taken, 0)
                target, taken = min(len(self.admitted) + left, self.limit), None
            if self._admit([job for job in jobs if job.key not in self.examined], target):
                continue
            if is_last:
                break
            size *= 4
        return left

    def _admit(self, jobs: Sequence[_Candidate], target: int) -> bool:
        """Admit jobs; return whether to read again, as others than those that were chosen may have their places."""
        left = iter(jobs)
        while len(self.admitted) < target:
            before: Counter[tuple[int, int]] = Counter(self.taken)
            chosen: list[_Candidate] = []
            for job in left:
                self.examined.add(job.key)
                if self._allows(job):
                    self._record(job)
                    chosen.append(job)
                    if len(self.admitted) + len(chosen) == target:
                        break
            if not chosen:
                return False
            kept = chosen
            if not self.statements.engine.has_one_writer:
                self.taken = before
                kept = self._locked(chosen)
            self.admitted += [job.key for job in kept]
            self.tried.update(job.key for job in chosen)
            if len(kept) < len(chosen):
                self.examined = set(self.tried)
                for full in self.full.values():
                    full.clear()
                self._find_full()
                return True
        return False

    def _locked(self, chosen: Sequence[_Candidate]) -> list[_Candidate]:
        """Lock the keys of some jobs and their rows; return those that may still begin."""
        names = {job.key: self._lock_names(job) for job in chosen}
        wanted = [*dict.fromkeys(name for each in names.values() for name in each)]
        locked = set(self.statements.engine.lock_keys(self.connection, self.spec.table, wanted))
        self.contended.update(name for name in wanted if name not in locked)
        keys = [key for key, needed in names.items() if locked.issuperset(needed)]
        if not keys:
            return []
        jobs = self._candidates(self.statements.again, {_CHOSEN: self.spec.bind_keys(keys)})
        self._count()
        kept = []
        for job in jobs:
            # A job may have been given to another key since it was read.
            if locked.issuperset(self._lock_names(job)) and self._allows(job):
                self._record(job)
                kept.append(job)
        return kept

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        statements, memory = self.statements, turns_of(self.spec)
        levels: list[Any] = [0]
        if self.spec.has("priority"):
            levels = [*self.connection.execute(statements.levels, self.given).scalars()]
            levels.sort(key=lambda level: (level is None, level))
        for level in levels:
            if len(self.admitted) >= self.limit:
                return
            found = self.connection.execute(statements.turns, {**self.given, **self._known_full(), _LEVEL: level})
            keys = sorted((tuple(row) for row in found), key=repr)
            last, taken = memory.last(level)
            start = next((number for number, key in enumerate(keys) if last is not None and repr(key) >= repr(last)), 0)
            keys = keys[start:] + keys[:start]
            order = keys
            if last in keys:
                # What is left of its turn; it comes once more at the end of the cycle, for its next turn.
                is_over = not self._take_turn(level, keys[0], taken)
                order = [*keys[1:], keys[0]]
                keys = order if is_over else keys
            begun = {key for key in order if self._take_turn(level, key, 0) and self.begun_in_turn}
            for key in keys:
                if key in begun or key == last:
                    self._take_turn(level, key, None)

    def _take_turn(self, level: Any, key: tuple[Any, ...], taken: int | None) -> int:
        """Admit jobs of a key; return whether its turn had jobs left, and note whether any was admitted."""
        before = len(self.admitted)
        if before >= self.limit:
            return 0
        of_turn = {_LEVEL: level, **{f"{_TURN}_{number}": part for number, part in enumerate(key)}}
        left = self._take(self.statements.window_of_turn, of_turn, taken=taken)
        self.begun_in_turn = len(self.admitted) > before
        return left

    # -- checks --------------------------------------------------------------------------------------------------------

    def _candidates(self, statement: AnySelect, parameters: Given) -> list[_Candidate]:
        width, number = len(self.spec.keys), len(self.checks)
        found: dict[Key, _Candidate] = {}
        rows = self.connection.execute(statement, {**self.given, **parameters}).all()
        self.read = len(rows)
        for row in rows:
            pairs = row[width : width + 2 * number]
            concerned = [
                (check, pairs[2 * place], pairs[2 * place + 1])
                for place, check in enumerate(self.checks)
                if pairs[2 * place] is not None
            ]
            # A second table in the filter may match a job several times.
            key = tuple(row[:width])
            found.setdefault(key, _Candidate(key, concerned, row[-1]))
        return [*found.values()]

    def _known_full(self) -> Given:
        most = _MOST_EXCLUDED // max(1, len(self.full))
        return {f"{_FULL}_{number}": [*keys][:most] for number, keys in self.full.items()}

    def _allows(self, job: _Candidate) -> bool:
        if self.contended and not self.contended.isdisjoint(self._lock_names(job)):
            return False
        for check, hashed, most in job.concerned:
            if most is None:
                continue
            if isinstance(check, LimitCheck):
                room = most - self.runs[check.number].get(hashed, 0)
            elif isinstance(check, RateCheck):
                room = self._room_of_rate(check, hashed)
            else:
                room = 1
            if self.taken[check.number, hashed] >= room:
                if not isinstance(check, OrderCheck):
                    self.full[check.number].add(hashed if _is_full_for_all(check) else (hashed, most))
                return False
        return True

    def _record(self, job: _Candidate) -> None:
        for check, hashed, _ in job.concerned:
            self.taken[check.number, hashed] += 1

    def _lock_names(self, job: _Candidate) -> list[str]:
        return [self._lock_name(check, hashed) for check, hashed, most in job.concerned if most is not None]

    def _lock_name(self, check: Check, hashed: int) -> str:
        # By the columns: programs of two versions may have other attributes for them.
        columns = ",".join(column.name for column in check.job_key.columns)
        return f"{type(check).__name__} {columns} {hashed}"

    def _count(self) -> None:
        for number, running in self.statements.running.items():
            rows: list[Any] = [*self.connection.execute(running)]
            self.runs[number] = {hashed: count for hashed, count in rows}  # noqa: C416 - of rows, which dict() does not take
        self._find_full()
        self.begins, self.now = {}, None

    def _find_full(self) -> None:
        """Note the keys whose limit is reached, so that queries leave out their jobs."""
        for check in self.checks:
            most: Any = check.job_key.config.most if isinstance(check, LimitCheck) else None
            if isinstance(most, int):
                self.full[check.number].update(key for key, runs in self.runs[check.number].items() if runs >= most)

    # -- rates ---------------------------------------------------------------------------------------------------------

    def _room_of_rate(self, check: RateCheck, hashed: int) -> int:
        next_at, throttled = self._rate(check, hashed)
        now, rate = self._moment(), check.job_key
        if throttled:
            return 0
        ahead = (next_at - now).total_seconds()
        return rate.config.burst - _ceil(ahead / rate.interval)

    def _rate(self, check: RateCheck, hashed: int) -> tuple[datetime, bool]:
        """Return when the next job of a key may begin, no earlier than now, and whether the key is held back."""
        now, rate = self._moment(), check.job_key
        known = self.begins.setdefault(check.number, {})
        if hashed not in known:
            found = self.connection.execute(self.statements.rates[check.number], {_CHOSEN: [hashed]}).first()
            next_at = now if found is None or found.next_at is None else max(found.next_at, now)
            most = now + timedelta(seconds=rate.interval * rate.config.burst)
            if next_at > most:
                # The clock was set back. It must not hold the key back for longer than a whole burst.
                next_at = most
                name = self._lock_name(check, hashed)
                if name in self.statements.engine.lock_keys(self.connection, self.spec.table, [name]):
                    self._write_rate(check, hashed, next_at)
            until = None if found is None else found.throttled_until
            known[hashed] = next_at, until is not None and until > now
        return known[hashed]

    def _write_rate(self, check: RateCheck, hashed: int, next_at: datetime) -> None:
        row = {"queue": self.spec.name, "rate": check.job_key.name, "key": hashed, "next_at": next_at}
        self.connection.execute(insert_or_replace(self.spec.side_tables[RATE], row, replaced=["next_at"]))

    def _moment(self) -> datetime:
        now = self.now
        if now is None:
            now = self.now = self.connection.execute(_NOW).scalar_one()
        return now

    def _begin_rates(self) -> None:
        """Move the times of the keys whose jobs begin."""
        for check in self.checks:
            if not isinstance(check, RateCheck):
                continue
            for (number, hashed), begun in sorted(self.taken.items()):
                if number == check.number and begun:
                    next_at, _ = self._rate(check, hashed)
                    moved = next_at + timedelta(seconds=check.job_key.interval * begun)
                    self._write_rate(check, hashed, moved)


_NOW = sa.select(clock())


def _ceil(number: float) -> int:
    return -int(-number // 1)
