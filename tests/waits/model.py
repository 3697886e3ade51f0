"""A model of how a job waits for others: the rows, the transactions, and each step that a transaction takes.

All parts of a state are tuples, so that it can be hashed and the transactions can be sorted.

A *relation* says which rows wait (W) for which rows (T). In a to-many relation, T has the foreign key: a batch waits
for its members. In a to-one relation, W has it: a dependent waits for its parent. The *level* of W is the number of
unsatisfied rows T in its relations; the count of W, ``waits_for``, is to be the level in every committed state in which
W has not begun (it is waiting or pending).

A transaction is a program: a sequence of statements under READ COMMITTED. Each step is atomic and reads what is
committed when it runs, and what its own transaction has written. Those of other transactions may come between any two.
A step that waits for a lock is not possible until the lock is free. Locks last until the end of the transaction. Any
transaction may roll back at any time, which covers the victims of deadlocks as well.

The triggers are a part of each write: the one BEFORE it chooses between ``waiting`` and ``pending``, and the ones AFTER
it record what changes for the rows that wait, and the rows that have to be *looked at*: those that are inserted, come
back, or have another parent. At the commit, what is recorded is applied in these steps:

1. apply: take what is recorded; determine the advisory locks that are needed.
2. bucket, for each of these: shared for each key that has changed; exclusive for each key by which a row that is looked
   at did not wait before.
3. find: the rows that wait for the changed keys or are looked at, and have not begun; row: lock each. These are *free*;
   only they are changed.
4. count: refuse new members of rows that are not free; add the change of each row to its count.
5. look: set the counts of the rows that are looked at to their levels; cancel those that have lost a parent.
6. cascade: cancel what waits for a failed row, and bring back what was cancelled for one that is requeued.
7. If these writes have recorded changes, it starts again; otherwise commit: the writes get visible, the locks end.

Where handlers are *held*, in the transaction of their claim, a pending row has begun as well: it may be running, and
nobody may wait for its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from tests.waits.programs import (
    ENDED,
    READY,
    Claim,
    Delete,
    Insert,
    Link,
    Reconcile,
    SetOpen,
    SetStatus,
    Statement,
    Status,
)
from tests.waits.scope import (
    ABSENT,
    Model,
    Relation,
    Row,
    failed_targets,
    is_kept,
    is_waiter,
    level,
    targets,
    waiters,
)

# -- the committed rows, and what each transaction has done so far -------------------------------------------------
Step = Literal["statement", "apply", "bucket", "find", "row", "count", "look", "cascade", "commit"]
Lock = tuple[int, int, bool]
"""An advisory lock: its relation, the key, and whether it is exclusive."""


class Change(NamedTuple):
    """What has changed for the rows that wait for a key."""

    relation: int
    key: int
    unsatisfied: int = 0
    failed: bool = False
    mended: bool = False
    added: bool = False
    """Whether an unsatisfied row is new."""
    deleted: bool = False
    """Whether an unsatisfied row is gone."""


class Look(NamedTuple):
    row: int
    relations: tuple[int, ...] = ()
    """Those by which it did not wait before."""
    is_fresh: bool = False
    """Whether it is inserted."""
    lost: tuple[tuple[int, int], ...] = ()
    """The references that became NULL, each with the relation."""


class Transaction(NamedTuple):
    program: int
    step: Step
    """What it does next."""
    statement: int = 0
    phase: int = 0
    """For a statement of several steps: which is next."""
    writes: tuple[tuple[int, Row], ...] = ()
    locks: tuple[int, ...] = ()
    """The rows that it has locked."""
    references: tuple[int, ...] = ()
    """The rows that it may refer to, as it has locked their keys: they cannot be deleted."""
    buckets: tuple[Lock, ...] = ()
    """Its advisory locks."""
    changes: tuple[Change, ...] = ()
    """Recorded by the triggers."""
    looks: tuple[Look, ...] = ()
    applied: tuple[Change, ...] = ()
    """The changes that are being applied."""
    looked: tuple[Look, ...] = ()
    """The looks that are being applied."""
    wanted: tuple[Lock, ...] = ()
    """The advisory locks that it has still to take."""
    rows: tuple[int, ...] = ()
    """The rows that it has still to lock."""
    free: tuple[int, ...] = ()
    """The rows that wait and that it may change."""
    read: tuple[tuple[int, int], ...] = ()
    """The counts that it has read too early, for the designs that do so."""


class State(NamedTuple):
    rows: tuple[Row, ...]
    transactions: tuple[Transaction, ...] = ()

    def with_transaction(self, index: int, transaction: Transaction | None) -> State:
        """Return the state after a step of a transaction, or without it."""
        others = self.transactions[:index] + self.transactions[index + 1 :]
        return self._replace(transactions=tuple(sorted((*others, transaction))) if transaction else others)

    def with_row(self, number: int, row: Row) -> State:
        return self._replace(rows=(*self.rows[:number], row, *self.rows[number + 1 :]))


# -- one step of a transaction -------------------------------------------------------------------------------------


class RefusedError(Exception):
    """The statement raises, and the transaction is rolled back."""


class BlockedError(Exception):
    """The step waits for a lock."""


class Execution:
    """A transaction while it takes a step: what it sees, with its own writes, and the triggers of each write."""

    def __init__(self, model: Model, state: State, transaction: Transaction, others: Iterable[Transaction]) -> None:
        self.model, self.transaction = model, transaction
        self.rows = list(state.rows)
        self.writes = dict(transaction.writes)
        for number, row in transaction.writes:
            self.rows[number] = row
        self.locks, self.references = set(transaction.locks), set(transaction.references)
        self.changes = {change[:2]: change for change in transaction.changes}
        self.looks = {look.row: look for look in transaction.looks}
        self.others = tuple(others)

    def done(self, step: Step, **fields: Any) -> Transaction:
        return self.transaction._replace(
            step=step,
            writes=tuple(sorted(self.writes.items())),
            locks=tuple(sorted(self.locks)),
            references=tuple(sorted(self.references)),
            changes=tuple(sorted(self.changes.values())),
            looks=tuple(sorted(self.looks.values())),
            **fields,
        )

    def is_locked(self, number: int) -> bool:
        return any(number in other.locks for other in self.others)

    def lock(self, number: int) -> None:
        if self.is_locked(number):
            raise BlockedError
        self.locks.add(number)

    def refer(self, number: int) -> None:
        """Lock the key of a row, as the check of a foreign key does."""
        if number < 0:
            return
        if any((number, ABSENT) in other.writes for other in self.others):
            raise BlockedError
        if self.rows[number].status == "absent":
            raise RefusedError
        self.references.add(number)

    def write(self, number: int, new: Row, *, decides: bool = True) -> None:
        """Write a row that is locked, or a new one; the triggers are a part of it."""
        old = self.rows[number]
        if new.status in READY and decides:
            status: Status = "waiting" if new.waits_for > 0 or new.is_open else "pending"
            new = new._replace(status=status, cancelled_for=-1)
        if new == old:
            return
        self.locks.add(number)
        self.rows[number] = self.writes[number] = new
        for index, relation in enumerate(self.model.scope.relations):
            if number in relation.targets:
                self._record_target(index, relation, number, old, new)
        if is_waiter(self.model, number) and new.status != "absent":
            self._record_waiter(number, old, new)
        if new.status == "cancelled" != old.status and new.cancelled_for < 0:
            self._cancel_members(number)

    def _record_waiter(self, number: int, old: Row, new: Row) -> None:
        """Record that a row has to be looked at."""
        design = self.model.design
        relations = list(enumerate(self.model.scope.relations))
        ones = {index for index, relation in relations if relation.kind == "to-one" and number in relation.waiters}
        if old.status == "absent":
            if design.look != "statement":
                self.look_at(Look(number, tuple(sorted(ones)), is_fresh=True))
            return
        moved = {index for index in ones if old.links[index] != new.links[index]}
        was_kept = old.status in READY if design.back == "not begun" else is_kept(self.model, old.status)
        is_back = is_kept(self.model, new.status) and not was_kept
        is_back = design.looks_back and (is_back or (new.status in READY and old.status not in READY))
        if not moved and not is_back:
            return
        mask = moved
        if not was_kept:
            mask = ones if design.back_locks == "to-one" else {index for index, _ in relations}
        lost = [
            (index, old.links[index])
            for index in moved
            if new.links[index] < 0 and self.model.scope.relations[index].on_failure != "continue"
        ]
        mask = set() if design.masks == "inserted" else mask
        self.look_at(Look(number, tuple(sorted(mask)), lost=tuple(sorted(lost))))

    def look_at(self, look: Look) -> None:
        if known := self.looks.get(look.row):
            relations = tuple(sorted({*known.relations, *look.relations}))
            lost = tuple(sorted({*known.lost, *look.lost}))
            look = Look(look.row, relations, known.is_fresh or look.is_fresh, lost)
        self.looks[look.row] = look

    def _record_target(self, index: int, relation: Relation, number: int, old: Row, new: Row) -> None:
        """Record what changes for those who wait for a row."""
        if relation.kind == "to-one":
            if old.status != "absent":
                self._add(index, number, old, new, moves=new.status == "absent")
            return
        before = old.links[index] if old.status != "absent" else -1
        after = new.links[index] if new.status != "absent" else -1
        if before == after >= 0:
            self._add(index, after, old, new)
        elif before != after:
            if before >= 0:
                self._add(index, before, old, ABSENT, moves=True)
            if after >= 0:
                is_late = relation.is_unsatisfied(new) and self.rows[after].status not in READY
                if is_late and old.status == "absent":
                    raise RefusedError
                self._add(index, after, ABSENT, new, moves=True)

    def _add(self, index: int, key: int, old: Row, new: Row, *, moves: bool = False) -> None:
        design, relation = self.model.design, self.model.scope.relations[index]
        unsatisfied = relation.is_unsatisfied(new) - relation.is_unsatisfied(old)
        if design.counts_events and not moves:
            unsatisfied = -(old.status == "processing" or new.status in ENDED)
        failed = relation.has_failed(new) - relation.has_failed(old)
        if not unsatisfied and not failed:
            return
        known = self.changes.get((index, key), Change(index, key))
        self.changes[index, key] = Change(
            index,
            key,
            known.unsatisfied + unsatisfied,
            known.failed or failed > 0,
            known.mended or (failed < 0 and (not moves or design.deleted == "mend")),
            known.added or (moves and unsatisfied > 0),
            known.deleted or (moves and unsatisfied < 0),
        )

    def _cancel_members(self, number: int) -> None:
        """Cancel the members of a batch that have not started and are not locked."""
        for index, relation in enumerate(self.model.scope.relations):
            if relation.kind == "to-many":
                for member in targets(self.model, self.rows, index, number):
                    if self.rows[member].status in READY and not self.is_locked(member):
                        self.write(member, self.rows[member]._replace(status="cancelled"))

    # -- statements --

    def execute(self, statement: Statement) -> int:
        """Execute a statement, or the next step of it; return which of its steps is next, or 0 if it has ended."""
        match statement:
            case Insert():
                self._insert(statement)
            case SetStatus():
                self._set_status(statement)
            case Claim():
                self._claim(statement.row)
            case Link():
                self._link(statement)
            case SetOpen():
                self.lock(statement.row)
                if self.rows[statement.row].status != "absent":
                    self.write(statement.row, self.rows[statement.row]._replace(is_open=statement.is_open))
            case Delete():
                return self._delete(statement.row)
            case Reconcile():
                return self._reconcile(statement.row)
        return 0

    def _insert(self, statement: Insert) -> None:
        for target in statement.links:
            self.refer(target)
        if self.is_locked(statement.row):
            raise BlockedError
        if self.rows[statement.row].status != "absent":
            raise RefusedError
        row = Row("pending", statement.links, is_open=statement.is_open)
        if is_waiter(self.model, statement.row):
            row = row._replace(waits_for=1)
            if self.model.design.look == "statement":
                rows = list(self.rows)
                rows[statement.row] = row
                row = row._replace(waits_for=level(self.model, rows, statement.row))
        self.write(statement.row, row)

    def _claim(self, number: int) -> None:
        if self.is_locked(number) or self.rows[number].status != "pending":
            raise RefusedError
        self.lock(number)

    def _link(self, statement: Link) -> None:
        self.lock(statement.row)
        self.refer(statement.target)
        row = self.rows[statement.row]
        if row.status != "absent":
            self._set_link(statement.row, statement.relation, statement.target)

    def _set_link(self, number: int, relation: int, target: int) -> None:
        links = list(self.rows[number].links)
        links[relation] = target
        self.write(number, self.rows[number]._replace(links=tuple(links)))

    def _set_status(self, statement: SetStatus) -> None:
        self.lock(statement.row)
        row = self.rows[statement.row]
        if row.status in statement.old:
            is_requeued = statement.new == "pending"
            row = row._replace(status=statement.new, started=row.started and not is_requeued)
            self.write(statement.row, row, decides=self.model.design.checks_requeued or not is_requeued)

    def _delete(self, number: int) -> int:
        """Delete a row, and then take it from each row that refers to it."""
        if self.transaction.phase == 0:
            if any(number in other.references for other in self.others):
                raise BlockedError
            self.lock(number)
            if self.rows[number].status != "absent":
                self.write(number, ABSENT)
        for index, relation in enumerate(self.model.scope.relations):
            if relation.kind == "to-one":
                for waiter in waiters(self.model, self.rows, index, number):
                    if self.transaction.phase == 0:
                        return 1
                    self.lock(waiter)
                    self._set_link(waiter, index, -1)
        return 0

    def _reconcile(self, number: int) -> int:
        """Count for a row, whether its count is right or not: it may have been wrong from elsewhere."""
        design, phase = self.model.design, self.transaction.phase
        if design.reconciles == "look":
            if self.rows[number].status in READY:
                self.look_at(Look(number))
            return 0
        if phase == 0 and design.reconciles == "statement":
            self.transaction = self.transaction._replace(read=((number, level(self.model, self.rows, number)),))
            return 1
        if phase < 2:
            self.lock(number)
            return 2
        if self.rows[number].status in READY:
            count = dict(self.transaction.read).get(number, level(self.model, self.rows, number))
            self.write(number, self.rows[number]._replace(waits_for=count))
        self.transaction = self.transaction._replace(read=())
        return 0

    # -- what happens at the commit --

    def next_step(self) -> Step:
        if self.looks or self.changes:
            return "apply"
        statements = self.model.scope.programs[self.transaction.program].statements
        return "statement" if self.transaction.statement < len(statements) else "commit"

    def apply(self) -> Transaction:
        """Take what is recorded, and find out which advisory locks it needs."""
        read: tuple[tuple[int, int], ...] = ()
        if self.model.design.look == "before locks":
            read = tuple((number, level(self.model, self.rows, number)) for number in self.looks)
        wanted = self._needed_buckets()
        applied, looked = self.transaction.changes, self.transaction.looks
        self.changes, self.looks = {}, {}
        wanted = sorted(set(wanted) - set(self.transaction.buckets))
        step: Step = "bucket" if wanted else "find"
        return self.done(step, applied=applied, looked=looked, wanted=tuple(wanted), read=read)

    def _needed_buckets(self) -> list[Lock]:
        design, relations = self.model.design, self.model.scope.relations
        if design.buckets == "none":
            return []
        needed = {change[:2]: False for change in self.transaction.changes}
        if design.buckets == "both":
            for look in self.transaction.looks:
                for index in look.relations if design.masks != "all" else range(len(relations)):
                    if look.row not in relations[index].waiters:
                        continue
                    if relations[index].kind == "to-many":
                        needed[index, look.row] = True
                    else:
                        for target in targets(self.model, self.rows, index, look.row):
                            if not self._is_exempt(index, target):
                                needed[index, target] = True
        return [(*key, is_exclusive) for key, is_exclusive in needed.items()]

    def _is_exempt(self, index: int, target: int) -> bool:
        """Whether a look at a row need not lock the bucket of one of its parents."""
        if target in self.writes:
            return True
        return self.model.design.exempt == "satisfied" and not self.model.scope.relations[index].is_unsatisfied(
            self.rows[target]
        )

    def lock_bucket(self) -> Transaction:
        (relation, key, is_exclusive), *wanted = self.transaction.wanted
        for other in self.others:
            if (relation, key, True) in other.buckets or (is_exclusive and (relation, key, False) in other.buckets):
                raise BlockedError
        buckets = tuple(sorted({*self.transaction.buckets, (relation, key, is_exclusive)}))
        return self.done("bucket" if wanted else "find", buckets=buckets, wanted=tuple(wanted))

    def _is_free(self, number: int) -> bool:
        """Whether a row, once it is locked, may be changed: it is counted, or it comes back here."""
        row, is_looked_at = self.rows[number], any(look.row == number for look in self.transaction.looked)
        if row.cancelled_for >= 0:
            return is_looked_at or number in self._waiters(each for each in self.transaction.applied if each.mended)
        return is_kept(self.model, row.status) or (is_looked_at and row.status in READY)

    def _waiters(self, changes: Iterable[Change]) -> set[int]:
        return {number for change in changes for number in waiters(self.model, self.rows, *change[:2])}

    def find(self) -> Transaction:
        mine = self._waiters(self.transaction.applied) | {look.row for look in self.transaction.looked}
        found = [number for number in sorted(mine) if self._is_free(number)]
        if not self.model.design.locks_waiting_rows:
            read = tuple((number, self.rows[number].waits_for) for number in found)
            return self.done("count", read=read, free=tuple(found))
        if self.model.scope.held and self.model.design.held == "skipped":
            found = [number for number in found if self.rows[number].status != "pending" or not self.is_locked(number)]
        wanted = tuple(number for number in found if number not in self.locks)
        free = tuple(number for number in found if number in self.locks)
        return self.done("row" if wanted else "count", rows=wanted, free=free)

    def lock_row(self) -> Transaction:
        """Lock a row, unless its newest version has begun."""
        (number, *wanted), free = self.transaction.rows, self.transaction.free
        if self.is_locked(number):
            raise BlockedError
        if self._is_free(number):
            self.locks.add(number)
            free = (*free, number)
        return self.done("row" if wanted else "count", rows=tuple(wanted), free=free)

    def count(self) -> Transaction:
        rows, read = tuple(self.rows), dict(self.transaction.read)
        free, looked = self.transaction.free, {look.row: look for look in self.transaction.looked}
        changed: dict[int, int] = {}
        for change in self.transaction.applied:
            for number in waiters(self.model, rows, *change[:2]):
                if change.added and number not in free and self._rechecks(looked.get(number)):
                    raise RefusedError
                if number in free and number not in looked:
                    changed[number] = changed.get(number, 0) + change.unsatisfied
        for number, change_of_count in changed.items():
            self.lock(number)
            count = max(0, read.get(number, rows[number].waits_for) + change_of_count)
            self.write(number, rows[number]._replace(waits_for=count))
        return self.done("look" if looked else "cascade")

    def _rechecks(self, look: Look | None) -> bool:
        rechecks = self.model.design.rechecks
        if look and look.is_fresh:
            return False
        return rechecks == "all" or (rechecks == "not looked at" and not look)

    def look(self) -> Transaction:
        rows: Sequence[Row] = tuple(self.rows) if self.model.design.looks_together else self.rows
        read = dict(self.transaction.read) if self.model.design.look == "before locks" else {}
        for look in self.transaction.looked:
            if look.row not in self.transaction.free:
                continue
            row = rows[look.row]
            new = row._replace(waits_for=read.get(look.row, level(self.model, rows, look.row)))
            if any(self._has_lost(rows, look.row, *each) for each in look.lost):
                # One that was cancelled for a parent that had failed does not come back without it.
                keeps = row.cancelled_for if self.model.design.deleted != "cancel" else -1
                if row.status in READY or keeps < 0:
                    new = new._replace(status="cancelled", cancelled_for=keeps)
            self.write(look.row, new)
        return self.done("cascade")

    def _has_lost(self, rows: Sequence[Row], number: int, index: int, target: int) -> bool:
        design, relation = self.model.design, self.model.scope.relations[index]
        if rows[number].links[index] >= 0 and design.lost != "ever":
            return False
        was_deleted = any(each[:2] == (index, target) and each.deleted for each in self.transaction.applied)
        return relation.is_unsatisfied(rows[target]) or (was_deleted and design.lost != "now")

    def cascade(self) -> Transaction:
        rows, applied, looks = tuple(self.rows), self.transaction.applied, self.transaction.looked
        looked = {look.row for look in looks}
        failing = looked | self._waiters(change for change in applied if change.failed)
        mended = looked | self._waiters(change for change in applied if change.mended)
        if self.model.design.deleted == "keep":
            mended -= {look.row for look in looks if look.lost}
        for number in self.transaction.free:
            row, failed = rows[number], failed_targets(self.model, rows, number)
            still = failed if self.model.design.returns_for == "all relations" else row.cancelled_for in failed
            if number in failing and row.status == "waiting" and failed:
                self.write(number, row._replace(status="cancelled", cancelled_for=failed[0]))
            elif number in mended and row.cancelled_for >= 0 and not still:
                self.write(number, row._replace(status="pending"))
        return self.done(self.next_step(), applied=(), looked=(), free=(), read=())


def advance(model: Model, state: State, index: int) -> State:
    """Carry out the next step of a transaction; raise if it has to wait."""
    transaction = state.transactions[index]
    others = state.transactions[:index] + state.transactions[index + 1 :]
    if transaction.step == "commit":
        rows = list(state.rows)
        for number, row in transaction.writes:
            rows[number] = row
        return State(tuple(rows), others)
    try:
        return state.with_transaction(index, step(model, state, transaction, others))
    except RefusedError:
        return state.with_transaction(index, None)


def step(model: Model, state: State, transaction: Transaction, others: Iterable[Transaction]) -> Transaction:
    execution = Execution(model, state, transaction, others)
    if transaction.step == "statement":
        return _statement(model, execution, transaction)
    steps = {
        "apply": execution.apply,
        "bucket": execution.lock_bucket,
        "find": execution.find,
        "row": execution.lock_row,
        "count": execution.count,
        "look": execution.look,
        "cascade": execution.cascade,
    }
    return steps[transaction.step]()


def _statement(model: Model, execution: Execution, transaction: Transaction) -> Transaction:
    """Execute the next statement of the program, or a part of it."""
    statements = model.scope.programs[transaction.program].statements
    phase = execution.execute(statements[transaction.statement])
    execution.transaction = execution.transaction._replace(statement=transaction.statement + (not phase), phase=phase)
    is_last = execution.transaction.statement == len(statements)
    return execution.done(execution.next_step() if is_last else "statement")
