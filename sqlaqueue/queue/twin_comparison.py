"""Comparisons of jobs by their unique values, which another engine may write by one column instead.

PostgreSQL compares the columns of a partial index. An engine without such an index keeps a digest of these columns in
a column of its own, and its compiler compares that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.functions import FunctionElement

SAME, VALUES = "sqlaqueue_same_unique_values", "sqlaqueue_unique_values"
"""The names of the two elements: a compiler with a method for one of them renders it in its own way."""
_WITH_NULLS = "_with_nulls"


class SameUniqueValues(FunctionElement[bool]):
    """The condition that a row of a queue's table and another row have the same values.

    :param condition: as PostgreSQL has it.
    :param key: a column of the row's key, by whose table the compiler knows the row.
    :param others: the values of the other row.
    """

    name = SAME
    inherit_cache = True
    type = sa.Boolean()
    nulls_distinct = True

    def __init__(self, condition: sa.ColumnElement[bool], key: Any, others: Sequence[Any]) -> None:
        # It is one of several conditions.
        super().__init__(condition.self_group(against=operators.and_), key, *others)

    def self_group(self, against: Any = None) -> Any:
        """Return the condition as it is: the base class adds ``= 1`` for databases without booleans."""
        return self


class SameUniqueValuesOrNulls(SameUniqueValues):
    """The same, where two NULLs are equal."""

    name = SAME + _WITH_NULLS
    inherit_cache = True
    nulls_distinct = False


class UniqueValues(FunctionElement[Any]):
    """The values of a row, to order and to group by.

    The order is that of the index, so that two transactions that insert rows lock its entries in one order.

    :param values: the values of a row.
    """

    name = VALUES
    inherit_cache = True
    nulls_distinct = True


class UniqueValuesOrNulls(UniqueValues):
    """The same, where two NULLs are equal."""

    name = VALUES + _WITH_NULLS
    inherit_cache = True
    nulls_distinct = False


def same_unique_values(
    condition: sa.ColumnElement[bool], key: Any, others: Sequence[Any], *, nulls_distinct: bool
) -> sa.ColumnElement[bool]:
    """Return the condition that two rows have the same values, see :class:`SameUniqueValues`."""
    made = SameUniqueValues if nulls_distinct else SameUniqueValuesOrNulls
    return made(condition, key, others)


def unique_values(values: Sequence[Any], *, nulls_distinct: bool) -> sa.ColumnElement[Any]:
    """Return what to order and to group by, see :class:`UniqueValues`."""
    made = UniqueValues if nulls_distinct else UniqueValuesOrNulls
    return made(*values)


@compiles(SameUniqueValues)
def _render_condition(element: SameUniqueValues, compiler: Any, **options: Any) -> str:
    own = getattr(compiler, f"visit_{SAME}", None)
    condition, *_ = element.clauses
    return str(compiler.process(condition, **options) if own is None else own(element, **options))


@compiles(UniqueValues)
def _render_values(element: UniqueValues, compiler: Any, **options: Any) -> str:
    own = getattr(compiler, f"visit_{VALUES}", None)
    if own is not None:
        return str(own(element, **options))
    return ", ".join(compiler.process(value, **options) for value in element.clauses)
