"""Statements that change rows in several places, as a series of steps in one transaction.

PostgreSQL executes an UPDATE in a CTE and selects what it returned in one statement. Other engines have no CTE that
changes rows: each is executed by itself, before the statement that uses it. Its rows are given to the following
statements as one JSON document, which the compiler reads in the place of the CTE.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.sql.selectable import CTE

from sqlaqueue.engines.verbs import carry_out
from sqlaqueue.exc import StatementError
from sqlaqueue.sql.engine import OtherEngine, mark_of, own_work, plain_form, steps_for

_PREFIX = "sqlaqueue_rows_"
_SHARED = "_sqlaqueue_shared"

_LOCKS = "_sqlaqueue_locks"
_USES = "_sqlaqueue_uses"

_steps: dict[bool, WeakKeyDictionary[Any, tuple[CTE, ...]]] = {False: WeakKeyDictionary(), True: WeakKeyDictionary()}


def is_step(cte: CTE, *, locks_apart: bool = False) -> bool:
    """Return whether a CTE is executed before the statement, so that its rows are given as a parameter.

    It is if it changes rows, or if several steps read it: after the first of them it would find other rows. The latter
    is known only after :func:`steps_of` has looked at the whole statement.

    :param locks_apart: whether a CTE that locks rows is one, for a database that cannot lock within another statement.
    """
    return cte.element.is_dml or _SHARED in cte.__dict__ or (locks_apart and _locks(cte))


def _locks(cte: CTE) -> bool:
    known: bool | None = cte.__dict__.get(_LOCKS)
    if known is None:
        plain: Any = plain_form(cte)
        element = cte.element if plain is None else plain.element
        known = cte.__dict__[_LOCKS] = getattr(element, "_for_update_arg", None) is not None
    return known


def keys_in(cte: CTE) -> list[Any]:
    """Return the columns of a CTE that changes rows which are the primary key of these."""
    table = cte.element.table  # type: ignore[attr-defined] # the element of such a CTE has a table
    return [column for column in cte.c if any(column.shares_lineage(key) for key in table.primary_key)]


def refuse_without_step(name: str, database: str) -> Exception:
    """Return the error of a statement whose step was not executed: it is none of the library's."""
    return StatementError(
        f"the CTE {name} changes or locks rows of a queue, which {database} cannot do within another statement; "
        "execute it first, by itself, and give the keys to the statement"
    )


class _RowsParameter(sa.TypeDecorator[str]):
    """The rows of a step, as JSON."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        if isinstance(value, _Missing):
            raise refuse_without_step(value.step, dialect.name)
        return value


class _Missing(NamedTuple):
    """Stands for the rows of a step until it is executed."""

    step: str


def rows_parameter(cte: CTE) -> sa.BindParameter[Any]:
    """Return the parameter with the rows of a CTE that was executed before, as JSON."""
    return sa.bindparam(f"{_PREFIX}{cte.name}", _Missing(str(cte.name)), type_=_RowsParameter(), unique=False)


def steps_of(statement: Any, *, locks_apart: bool = False) -> tuple[CTE, ...]:
    """Return the CTEs of a statement that are executed before it, in this order."""
    known = _steps[locks_apart]
    found = known.get(statement)
    if found is None:
        found = known[statement] = tuple(_find_steps(statement, locks_apart))
    return found


def execute_steps(
    connection: sa.Connection, statement: Any, given: Mapping[str, Any], run: Any, *, locks_apart: bool = False
) -> dict[str, str]:
    """Execute the steps of a statement; return their rows as parameters of the statement itself.

    :param given: the parameters of the statement.
    :param run: executes one step, and returns the rows as the driver has them.
    """
    rows: dict[str, str] = {}
    for cte in steps_of(statement, locks_apart=locks_apart):
        names, needed = _uses_of(cte, locks_apart)
        used: dict[str, Any] = {name: given[name] for name in names & given.keys()}
        used |= {name: text for name, text in rows.items() if name in needed}
        executed = run(connection, cte, used)
        rows[rows_parameter(cte).key] = json.dumps(executed, default=lambda value: bytes(value).hex())
    return rows


def _uses_of(cte: CTE, locks_apart: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters of a step, and of those with the rows of other steps."""
    # To look for them takes longer than to execute a small step.
    known = cte.__dict__.setdefault(_USES, {})
    if locks_apart not in known:
        names = frozenset(str(each.key) for each in elements(cte.element) if isinstance(each, sa.BindParameter))
        others = (other for other in _ctes(cte.element) if is_step(other, locks_apart=locks_apart))
        known[locks_apart] = names, frozenset(str(rows_parameter(other).key) for other in others)
    uses: tuple[frozenset[str], frozenset[str]] = known[locks_apart]
    return uses


def _children(element: Any) -> Iterator[Any]:
    yield from element.get_children()
    # The tables of an UPDATE are known by its columns only.
    table = getattr(element, "table", None)
    if isinstance(table, CTE):
        yield table


def elements(statement: Any, *, into_steps: bool = True) -> Iterator[Any]:
    """Yield a statement and all elements in it.

    :param into_steps: whether to yield what is inside of a CTE that changes rows, and so is a step of its own.
    """
    seen, stack = set(), [statement]
    while stack:
        element = stack.pop()
        if id(element) in seen:
            continue
        seen.add(id(element))
        yield element
        if into_steps or not (isinstance(element, CTE) and element.element.is_dml):
            stack.extend(_children(element))


def _ctes(statement: Any, *, into_steps: bool = True) -> Iterator[CTE]:
    for element in elements(statement, into_steps=into_steps):
        if isinstance(element, CTE) and element is not statement:
            yield element


def _find_steps(statement: Any, locks_apart: bool) -> Iterator[CTE]:
    all_of_them = dict.fromkeys(_ctes(statement))
    locking = [cte for cte in all_of_them if locks_apart and _locks(cte)]
    changing = [cte for cte in all_of_them if cte.element.is_dml]
    if changing:
        # A query that several steps read is executed once: after the first of them it would find other rows.
        users = Counter(
            cte
            for part in [*(cte.element for cte in changing), statement]
            for cte in {cte for cte in _ctes(part, into_steps=False) if not cte.element.is_dml}
        )
        for cte, number in users.items():
            if number > 1 and not any(inner.element.is_dml for inner in _ctes(cte.element)):
                cte.__dict__[_SHARED] = True
    done: set[CTE] = set()
    for cte in [*locking, *changing]:
        yield from _in_order(cte, done, locks_apart)


def _in_order(cte: CTE, done: set[CTE], locks_apart: bool) -> Iterator[CTE]:
    if cte in done:
        return
    done.add(cte)
    for inner in dict.fromkeys(_ctes(cte.element)):
        if is_step(inner, locks_apart=locks_apart) and inner is not cte:
            yield from _in_order(inner, done, locks_apart)
    yield cte


_IN_STEP: ContextVar[bool] = ContextVar("sqlaqueue_in_step", default=False)
"""Whether a step is being executed, whose own steps have been executed before it."""

RunStep = Callable[[sa.Connection, Any, Mapping[str, Any]], list[list[Any]]]
Forget = Callable[[sa.Connection], None]


def _check_supported(other: OtherEngine, mark: Any, known: WeakSet[Any]) -> None:
    """Refuse the claim of a queue that the database cannot carry."""
    if mark is not True and mark not in known:
        other.check_supported(mark)
        known.add(mark)


def _carry_out(
    other: OtherEngine, connection: sa.Connection, steps: Any, statement: Any, params: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]] | None:
    if steps is None:
        return None
    token = _IN_STEP.set(True)
    try:
        with own_work():
            return carry_out(other, connection, steps, statement, params)
    finally:
        _IN_STEP.reset(token)


def carry_out_statements(
    engine: sa.Engine,
    other: OtherEngine,
    run_step: RunStep,
    *,
    locks_apart: bool = False,
    forget: Forget = lambda _: None,
) -> None:
    """Execute the steps of each statement of the library before the statement itself.

    :param other: refuses the claims of queues that its database cannot carry.
    :param locks_apart: whether a CTE that locks rows is a step, see :func:`~sqlaqueue.engines.steps.is_step`.
    :param forget: is called when a statement has ended, also by an error, and drops what its steps have kept.
    """
    supported: WeakSet[Any] = WeakSet()

    @event.listens_for(engine, "before_execute", retval=True)
    def execute(
        connection: sa.Connection,
        statement: Any,
        multiparams: Any,
        params: Mapping[str, Any],
        execution_options: Mapping[str, Any],
    ) -> tuple[Any, Any, Any]:
        mark = mark_of(statement, execution_options)
        if mark is None or _IN_STEP.get():
            return statement, multiparams, params
        _check_supported(other, mark, supported)
        carried_out = _carry_out(other, connection, steps_for(statement, execution_options), statement, params)
        if carried_out is not None:
            return carried_out[0], (), carried_out[1]
        if steps_of(statement, locks_apart=locks_apart):
            token = _IN_STEP.set(True)
            try:
                with own_work():
                    rows = execute_steps(connection, statement, params, run_step, locks_apart=locks_apart)
            except BaseException:
                forget(connection)
                raise
            finally:
                _IN_STEP.reset(token)
            return statement, multiparams, {**params, **rows}
        return statement, multiparams, params

    @event.listens_for(engine, "after_execute")
    def executed(connection: sa.Connection, *_: Any) -> None:
        if not _IN_STEP.get():
            forget(connection)

    @event.listens_for(engine, "handle_error")
    def failed(context: ExceptionContext) -> None:
        if context.connection is not None:
            forget(context.connection)
