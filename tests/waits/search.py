"""The invariants of the model, and a search of all states that it can reach.

W1. The count of each row that has not begun is its level.
W2. A row that is pending, and so can be claimed, has the level 0 and is not open. Where handlers are held, it had when
    it became pending.
W3. A row that is waiting has a level above 0 or is open: it is not forgotten.
W4. The handler of a row starts once, unless the row is retried, rescued or requeued.
W5. Where a relation says so, no row waits for one that has failed, but is cancelled; it comes back when the last one
    that has failed is requeued.
W6. No unsatisfied member gets into a batch that has started or ended.
W7. A row that loses an unsatisfied parent is cancelled, and does not come back. The loss of a satisfied parent cancels
    nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.waits.model import BlockedError, RefusedError, State, Transaction, advance, step
from tests.waits.programs import READY, Claim, Insert, Link, Program, SetOpen, SetStatus, Statement, Status
from tests.waits.scope import Model, Row, failed_targets, is_kept, is_waiter, level, targets


class Action(NamedTuple):
    """One atomic step."""

    name: str
    after: State


def successors(model: Model, state: State) -> Iterator[Action]:
    """Yield every step that is possible in a state, with the state after it."""
    programs = model.scope.programs
    for index, transaction in enumerate(state.transactions):
        name = programs[transaction.program].name
        try:
            after = advance(model, state, index)
        except BlockedError:
            pass
        else:
            yield Action(f"[{name}] {transaction.step}", after)
        yield Action(f"[{name}] roll back", state.with_transaction(index, None))
    if len(state.transactions) < model.scope.connections:
        for number, program in enumerate(programs):
            if started := _start(model, state, number, program):
                yield Action(f"[{program.name}] start", started)
    for number in model.scope.claimed:
        row = state.rows[number]
        if row.status == "pending" and not any(number in transaction.locks for transaction in state.transactions):
            claimed = row._replace(status="processing", started=True)
            yield Action(f"claim {number}", state.with_row(number, claimed))


def _start(model: Model, state: State, number: int, program: Program) -> State | None:
    """Execute the first statement: to wait with nothing locked is the same as to start later."""
    inserted = {statement.row for statement in program.statements if isinstance(statement, Insert)}
    for statement in program.statements:
        if (state.rows[statement.row].status == "absent") != (statement.row in inserted):
            return None
    if not _has_effect(program.statements[0], state.rows):
        return None
    try:
        transaction = step(model, state, Transaction(number, "statement"), state.transactions)
    except (BlockedError, RefusedError):
        return None
    if transaction.step == "commit" and not transaction.writes:
        return None
    return state._replace(transactions=tuple(sorted((*state.transactions, transaction))))


def _has_effect(statement: Statement, rows: Sequence[Row]) -> bool:
    row = rows[statement.row]
    match statement:
        case SetStatus():
            return row.status in statement.old
        case Claim():
            return row.status == "pending"
        case Link():
            return row.links[statement.relation] != statement.target
        case SetOpen():
            return row.is_open != statement.is_open and (row.status in READY or not statement.is_open)
    return True


# -- the invariants ------------------------------------------------------------------------------------------------


def fault_of_rows(model: Model, rows: Sequence[Row]) -> str:
    """Return what is wrong with the committed rows, or an empty string."""
    for number, row in enumerate(rows):
        if not is_waiter(model, number) or not is_kept(model, row.status):
            continue
        truth = level(model, rows, number)
        if row.status == "pending" and (truth or row.is_open):
            return f"W2: row {number} is pending, and waits for {truth}"
        if row.status == "waiting" and not truth and not row.is_open:
            return f"W3: row {number} is waiting, and nothing is left that it waits for"
        if row.waits_for != truth:
            return f"W1: row {number} has the count {row.waits_for}, and waits for {truth}"
        if row.status == "waiting" and failed_targets(model, rows, number):
            return f"W5: row {number} waits for what has failed"
    return ""


def fault_of_step(model: Model, before: State, after: State) -> str:
    """Return what is wrong with a change of the committed rows, or an empty string."""
    for number, (old, new) in enumerate(zip(before.rows, after.rows, strict=True)):
        if old.started and new.status in READY and new.started:
            return f"W4: row {number} starts again"
        is_due = new.status == "pending" != old.status and is_waiter(model, number)
        if is_due and (truth := level(model, after.rows, number)):
            return f"W2: row {number} becomes pending, and waits for {truth}"
        for index, relation in enumerate(model.scope.relations):
            is_member = relation.kind == "to-many" and number in relation.targets and relation.is_unsatisfied(new)
            if not is_member or (batch := new.links[index]) < 0:
                continue
            is_added = old.status == "absent" or old.links[index] != batch
            if is_added and after.rows[batch].status not in READY and after.rows[batch].cancelled_for < 0:
                return f"W6: row {number} is a new member of {batch}, which is {after.rows[batch].status}"
        if "absent" not in {old.status, new.status} and is_waiter(model, number):
            fault = _fault_of_return(model, before, after, number) or _fault_of_loss(model, before, number, old, new)
            if fault:
                return fault
    return ""


def _fault_of_return(model: Model, before: State, after: State, number: int) -> str:
    """Return what is wrong where a row that was cancelled stays so, and the last one that had failed is requeued."""
    if before.rows[number].cancelled_for < 0 or after.rows[number].cancelled_for < 0:
        return ""
    if failed_targets(model, after.rows, number):
        return ""
    for index in failed_targets(model, before.rows, number):
        for target in targets(model, after.rows, index, number):
            if model.scope.relations[index].has_failed(before.rows[target]):
                return f"W5: row {number} stays cancelled, and nothing is left that has failed"
    return ""


def _fault_of_loss(model: Model, before: State, number: int, old: Row, new: Row) -> str:
    """Return what is wrong where a row has lost parents that it had to wait for."""
    ones = [
        (index, relation)
        for index, relation in enumerate(model.scope.relations)
        if relation.kind == "to-one" and relation.on_failure != "continue" and number in relation.waiters
    ]
    lost = [
        relation.is_unsatisfied(before.rows[old.links[index]])
        for index, relation in ones
        if old.links[index] >= 0 > new.links[index]
    ]
    # A row whose count is not kept is not locked by those who change its parents: they may come before or after.
    if any(lost) and (is_kept(model, old.status) or old.cancelled_for >= 0) and new.status != "cancelled":
        return f"W7: row {number} has lost what it waited for, and is {new.status}"
    is_cancelled = new.status == "cancelled" != old.status and new.cancelled_for < 0
    if is_cancelled and is_kept(model, old.status) and not any(lost) and not _is_set(model, number, "cancelled"):
        return f"W7: row {number} is cancelled, and has lost nothing that it waited for"
    is_without = any(index == old.cancelled_for and old.links[index] < 0 for index, _ in ones)
    if is_without and new.status in READY and not _is_set(model, number, "pending"):
        return f"W7: row {number} comes back, and has lost what it waited for"
    return ""


def _is_set(model: Model, number: int, status: Status) -> bool:
    """Whether a program may give a row a status, or a batch of the row."""
    rows = {number}
    for relation in model.scope.relations:
        if status == "cancelled" and relation.kind == "to-many" and number in relation.targets:
            rows.update(relation.waiters)
    statements = (statement for program in model.scope.programs for statement in program.statements)
    return any(isinstance(each, SetStatus) and each.row in rows and each.new == status for each in statements)


# -- the search, breadth first, so that the first fault that is found has the shortest trace -----------------------


@dataclass(frozen=True)
class Result:
    states: int
    """The number of states that were visited."""
    fault: str = ""
    """The invariant that is broken, or an empty string."""
    trace: tuple[str, ...] = ()
    """The steps that lead to the fault."""

    def __str__(self) -> str:
        steps = [f"{number:3}. {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([f"{self.states} states: {self.fault or 'no fault'}", *steps])


def search(model: Model, most: int = 20_000_000) -> Result:
    first = State(model.scope.rows)
    parents: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        for name, after in successors(model, state):
            fault = ""
            if after.rows != state.rows:
                fault = fault_of_rows(model, after.rows) or fault_of_step(model, state, after)
            if fault:
                trace = (*_trace(parents, state), _describe(name, state, after))
                return Result(len(parents), fault, trace)
            if after not in parents:
                parents[after] = (state, name)
                waiting.append(after)
        if len(parents) > most:
            message = f"more than {most} states: narrow the scope"
            raise OverflowError(message)
    return Result(len(parents))


def _trace(parents: dict[State, tuple[State, str] | None], last: State) -> tuple[str, ...]:
    lines = []
    while before := parents[last]:
        lines.append(_describe(before[1], before[0], last))
        last = before[0]
    return tuple(lines[::-1])


def _describe(name: str, before: State, after: State) -> str:
    rows = ", ".join(
        f"{number} {new.status}" + (f" ({new.waits_for})" if new.status != "absent" else "")
        for number, (old, new) in enumerate(zip(before.rows, after.rows, strict=True))
        if old != new
    )
    return name + (f" -> {rows}" if rows else "")
