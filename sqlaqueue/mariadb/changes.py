"""Divides an UPDATE or DELETE that returns something, and chooses the index by which rows are locked.

A scan locks every row that it looks at, and a sort looks at all of them. So the rows of a claim are found by the index
of the claim order, and those of a key by the primary key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, CollectionAggregate, Grouping, True_, Tuple
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import CTE, ScalarSelect, SelectBase
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.engines.steps import is_step
from sqlaqueue.exc import StatementError
from sqlaqueue.mariadb.execution import MARK, Divided, keys_place, value_place
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import plain_form

BY_KEY = "FORCE INDEX (PRIMARY)"
_RETURNED = f"{MARK} returned*/"
"""Stands for the SQL of what is returned, until the SELECT around it is rendered."""


def divided(compiler: Any, statement: Any, columns: Sequence[Any], returned: str) -> str:
    """Return the parts of a change as one text.

    :param statement: an UPDATE or DELETE of one table by its primary key.
    :param columns: what it returns.
    :param returned: the SQL of it.
    """
    table: sa.Table = statement.table
    keys = [*table.primary_key]
    if not keys:
        msg = (
            f"{table.name}: MariaDB has no UPDATE .. RETURNING, and what is done instead finds the changed rows by the "
            "primary key, which this table does not have; leave out returning(), and select the rows"
        )
        raise StatementError(msg)
    names = [compiler.process(key) for key in keys]
    locking, given, rest = _sources(statement, keys)
    values: dict[Any, Any] = _values_of(compiler, statement) if statement.is_update else {}
    # What a key gets is selected as well: by it the row is found after the change.
    computed = {
        column: value
        for column, value in values.items()
        if column.primary_key or not _is_in_place(value, column, table)
    }
    limit = _limit_of(compiler, statement)
    parts: list[tuple[str, str]] = []
    if locking is not None:
        parts.append(("lock", compiler.process(locking.correlate(None))))
    if locking is not None or given is not None:
        rest = [as_rendered(keys_place(names)), *rest]
    rest += [as_rendered(keys_place(names, *step)) for step in _joined_steps(rest, keys)]
    returns_keys = [getattr(column, "key", None) for column in columns] == [key.key for key in keys]
    reads_first = statement.is_delete and (given is not None or not returns_keys)
    if reads_first:
        parts.append(("select", _select(compiler, table, keys, rest, returned, limit=limit)))
    elif computed or (given is None and locking is None) or len(rest) > 1 or limit is not None:
        computed_values = [_as_expression(compiler, value, column) for column, value in computed.items()]
        shown = [Grouping(value).label(f"sqlaqueue_value_{number}") for number, value in enumerate(computed_values)]
        parts.append(("select", _select(compiler, table, keys, rest, None, shown, limit=limit)))
    for number, column in enumerate(computed):
        values[column] = sa.literal_column(value_place(len(keys) + number), column.type)
    changed = keys_place(names)
    if statement.is_update:
        target = f"{compiler.process(table, asfrom=True)} {BY_KEY}"
        change = f"UPDATE {target} SET {_assignments(compiler, values)} WHERE {changed}"  # noqa: S608 - SQL of the compiler
    else:
        change = compiler.process(sa.delete(table).where(as_rendered(changed)))
    parts.append(("change", change))
    if returns_keys or statement.is_delete:
        returns = "rest" if reads_first else "keys"
    else:
        source = f"{compiler.process(table, asfrom=True)} {BY_KEY}"
        # With a lock, which the transaction has already: at REPEATABLE READ another SELECT would not find the present
        # version of a row that the UPDATE has left as it was. The order lets the server look the keys up.
        read = f"SELECT {returned} FROM {source} WHERE {keys_place(names)} ORDER BY {', '.join(names)}"  # noqa: S608 - SQL of the compiler
        parts.append(("read", f"{read} FOR UPDATE SKIP LOCKED"))
        returns = "read"
    places = [len(keys) + [*computed].index(key) if key in computed else number for number, key in enumerate(keys)]
    return Divided(parts, returns, [key.name for key in keys], places, given).text()


def as_rendered(text: str, type_: Any = None) -> Any:
    """Return what the compiler has rendered as an expression, whose percent signs it would double again."""
    return sa.literal_column(text.replace("%%", "%"), type_)


def _select(
    compiler: Any,
    table: sa.Table,
    keys: Sequence[Any],
    where: Sequence[Any],
    returned: str | None,
    shown: Sequence[Any] = (),
    *,
    limit: str | None = None,
) -> str:
    """Return the SELECT that locks the rows of a change, in the order of their keys."""
    columns = [*keys, *shown] if returned is None else [*keys, sa.literal_column(_RETURNED)]
    found = sa.select(*columns).where(*where).limit(None if limit is None else sa.literal_column(limit, sa.Integer))
    others = [each for each in found.get_final_froms() if each is not table]
    # The rows of steps are few, and each finds its row by the key.
    found = found.select_from(*others, table) if others else found.select_from(table)
    if others:
        found = found.prefix_with("STRAIGHT_JOIN")
    if any(_is_about_key(each, keys) for each in where):
        found = found.with_hint(table, BY_KEY)
        if not others:
            found = found.order_by(*keys)
    rendered = str(compiler.process(found.with_for_update().correlate(None)))
    # Not a part of what was rendered, which would double each percent sign in it.
    return rendered if returned is None else rendered.replace(_RETURNED, returned)


def _limit_of(compiler: Any, statement: Any) -> str | None:
    """Return the SQL of the number of rows to which a program has limited a change, by ``mysql.limit()``."""
    kind = "update" if statement.is_update else "delete"
    # SQLAlchemy 2.0 has the second name, and its first versions limit no DELETE.
    names = (f"{kind}_post_criteria_clause", f"{kind}_limit_clause")
    render = next((getattr(compiler, name) for name in names if hasattr(compiler, name)), None)
    rendered = (None if render is None else render(statement)) or ""
    return rendered.removeprefix("LIMIT ") if rendered.startswith("LIMIT ") else None


def _sources(statement: Any, keys: Sequence[Any]) -> tuple[Any, tuple[str, Sequence[int]] | None, list[Any]]:
    """Return the SELECT that locks the rows of a statement, or the step that has, and the other conditions."""
    locking, given, rest = None, None, []
    for each in conjuncts(statement._where_criteria):  # noqa: SLF001 - not public
        rows = _locked_rows(each, keys) if locking is None and given is None else None
        if rows is None:
            rest.append(each)
        elif step_and_numbers(rows) is not None:
            given = step_and_numbers(rows)
        elif getattr(rows.element, "_for_update_arg", None) is not None:
            locking = rows.element
        else:
            rest.append(each)
    return locking, given, rest


def conjuncts(criteria: Sequence[Any]) -> Iterator[Any]:
    """Return the conditions that are all to be met, without those that are always true."""
    for each in criteria:
        plain: Any = plain_form(each)
        condition = each if plain is None else plain
        if isinstance(condition, BooleanClauseList) and condition.operator is operators.and_:
            yield from conjuncts([*condition.clauses])
        elif isinstance(condition, Grouping):
            yield from conjuncts([condition.element])
        elif not isinstance(condition, True_):
            yield condition


def _locked_rows(condition: Any, keys: Sequence[Any]) -> ScalarSelect[Any] | None:
    """Return the subquery among whose rows a key has to be."""
    if (
        len(keys) > 1
        or not isinstance(condition, BinaryExpression)
        or not isinstance(condition.right, CollectionAggregate)
    ):
        return None
    array: Any = condition.right.element
    array = array.element if isinstance(array, Grouping) else array
    if not (isinstance(array, FunctionElement) and array.name == "array") or not _is_one_of(condition.left, keys):
        return None
    rows: Any = array.clauses.clauses[0]
    rows = rows.element if isinstance(rows, Grouping) else rows
    return rows if isinstance(rows, ScalarSelect) else None


def step_and_numbers(rows: Any) -> tuple[str, Sequence[int]] | None:
    """Return the name of the step whose rows a subquery selects, and the columns; None for another subquery."""
    select: Any = getattr(rows, "element", None)
    select = getattr(select, "element", select) if isinstance(rows, Grouping) else select
    if not isinstance(select, sa.Select) or select.whereclause is not None:
        return None
    froms = select.get_final_froms()
    if len(froms) != 1 or not isinstance(froms[0], CTE) or not is_step(froms[0], locks_apart=True):
        return None
    columns, chosen = [*froms[0].c], [str(each.key) for each in select.selected_columns]
    return str(froms[0].name), [columns.index(froms[0].c[key]) for key in chosen]


def _joined_steps(conditions: Sequence[Any], keys: Sequence[Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Return the steps to which a table is joined by its key, with the columns of the key in their order.

    The rows of a step are JSON, whose texts have a collation of their own, by which no index can be used.
    """
    joined: dict[CTE, dict[str, int]] = {}
    for each in conditions:
        if not (isinstance(each, BinaryExpression) and each.operator is operators.eq):
            continue
        rows, left = getattr(each.right, "table", None), str(each.left.key)
        if isinstance(rows, CTE) and _is_one_of(each.left, keys) and is_step(rows, locks_apart=True):
            joined.setdefault(rows, {})[left] = [*rows.c].index(rows.c[str(each.right.key)])
    for rows, numbers in joined.items():
        if len(numbers) == len(keys):
            yield str(rows.name), [numbers[key.key] for key in keys]


def _values_of(compiler: Any, statement: Any) -> dict[Any, Any]:
    """Return the columns that an UPDATE sets, those that it does not name included, and their values."""
    table, ordered = statement.table, getattr(statement, "_ordered_values", None)
    given = dict(ordered) if ordered else dict(statement._values or {})  # noqa: SLF001 - not public
    values = {table.c[getattr(column, "key", column)]: value for column, value in given.items()}
    for column in table.c:
        if column in values:
            continue
        parameter, default = compiler.binds.get(column.key), column.onupdate
        if getattr(parameter, "_is_crud", False):
            # It gets its value when the statement is executed: from the caller, or from a function of the column.
            values[column] = parameter
        elif default is not None and default.is_clause_element:
            values[column] = default.arg
    return values


def _assignments(compiler: Any, values: Mapping[Any, Any]) -> str:
    assignments = []
    for column, given in values.items():
        value = _as_expression(compiler, given, column)
        assignments.append(f"{compiler.preparer.format_column(column)}={compiler.process(value.self_group())}")
    return ", ".join(assignments)


def _as_expression(compiler: Any, given: Any, column: Any) -> Any:
    value = given if isinstance(given, sa.ClauseElement) else sa.literal(given, column.type)
    if isinstance(value, sa.BindParameter) and compiler.binds.get(value.key) is not value:
        # Not a plain parameter: it would be named after its column, as that of the whole statement is.
        return sa.type_coerce(value, column.type)
    return value


def _is_in_place(value: Any, column: Any, table: sa.Table) -> bool:
    """Return whether an UPDATE computes a value as PostgreSQL does.

    MariaDB assigns one column after another, so an expression sees the new values of the columns before it.
    """
    if not isinstance(value, sa.ClauseElement):
        return True
    for part in iterate(value):
        # What a text of the program reads is not known.
        if isinstance(part, SelectBase | CTE | sa.TextClause) or getattr(part, "is_literal", False):
            return False
        if isinstance(part, sa.ColumnClause) and part.table is not None and not _is_one_of(part, [column]):
            return False
    return True


def _is_one_of(column: Any, columns: Sequence[Any]) -> bool:
    return any(getattr(column, "key", None) == each.key and column.shares_lineage(each) for each in columns)


def _is_about_key(condition: Any, keys: Sequence[Any]) -> bool:
    """Return whether a condition, or each of its alternatives, names a value of the first column of the key."""
    if isinstance(condition, Grouping):
        return _is_about_key(condition.element, keys)
    if isinstance(condition, BooleanClauseList):
        about = [_is_about_key(each, keys) for each in condition.clauses]
        return any(about) if condition.operator is operators.and_ else all(about)
    if isinstance(condition, sa.ColumnClause) and condition.is_literal:
        return condition.name.startswith(f"{MARK} keys")
    if not isinstance(condition, BinaryExpression) or condition.operator not in {operators.eq, operators.in_op}:
        return False
    left = condition.left.element if isinstance(condition.left, Grouping) else condition.left
    sides = [*(left.clauses if isinstance(left, Tuple) else [left]), condition.right]
    return any(isinstance(side, sa.ColumnClause) and _is_one_of(side, keys[:1]) for side in sides)


def hint_of(compiler: Any, name: Any) -> str:
    """Return the hint of an index. SQLAlchemy fills the name of the table in by the operator for texts."""
    return f"FORCE INDEX ({compiler.preparer.quote(str(name))})".replace("%", "%%")


def index_to_lock_by(compiler: Any, select: Any) -> tuple[Any, str] | None:
    """Return the table of a SELECT that locks rows of a queue, and the hint of the index that finds them."""
    for table in _tables(select.get_final_froms()):
        spec = queue_of(getattr(table, "element", table))
        if spec is None:
            continue
        where = [*conjuncts(select._where_criteria)]  # noqa: SLF001 - not public
        if any(_is_about_key(each, spec.keys) for each in where):
            return table, BY_KEY
        order = [getattr(each, "key", None) for each in select._order_by_clauses]  # noqa: SLF001 - SQLAlchemy has no public name for it
        purpose = None
        if order == [column.key for column in spec.claim_order] and select._limit_clause is not None:  # noqa: SLF001 - SQLAlchemy has no public name for it
            quarantined = spec.strategy.quarantined(spec)
            is_quarantined = quarantined is not None and any(each.compare(quarantined) for each in where)
            purpose = "quarantined" if is_quarantined else "claim"
        elif any(
            "lease_expires_at" in spec.columns and _names(each, spec.columns["lease_expires_at"]) for each in where
        ):
            purpose = "lease"
        for index in spec.claim_indexes:
            if purpose is not None and str(index.name).endswith(f"_{purpose}"):
                return table, hint_of(compiler, index.name)
    return None


def _names(condition: Any, column: Any) -> bool:
    return any(isinstance(part, sa.ColumnClause) and part.key == column.key for part in iterate(condition))


def _tables(froms: Sequence[Any]) -> Iterator[Any]:
    for each in froms:
        if isinstance(each, sa.Table):
            yield each
        elif isinstance(each, sa.Join):
            yield from _tables([each.left, each.right])
        elif isinstance(each, sa.Alias) and isinstance(each.element, sa.Table):
            yield each
