"""The hash of a key of several columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import Grouping

_SEED = sa.literal_column("'0'::bigint", sa.BigInteger())
"""As the server prints it, so that Alembic finds an index unchanged."""


class _CaseAsPrinted(sa.Case[Any]):
    """A CASE of one condition with the line breaks that the server prints, so that Alembic finds an index unchanged."""

    inherit_cache = True


@compiles(_CaseAsPrinted)
def _render(element: _CaseAsPrinted, compiler: Any, **options: Any) -> str:
    ((condition, value),) = element.whens
    condition = getattr(condition, "element", condition)
    when, then = (compiler.process(each, **options) for each in (condition, value))
    return f"\nCASE\n    WHEN {when} THEN {then}\n    ELSE NULL::bigint\nEND"


def key_hash(
    columns: Sequence[sa.ColumnElement[Any]], only: sa.ColumnElement[bool] | None = None
) -> sa.ColumnElement[int]:
    """Return a 64-bit hash of a key, for an index and for statements; NULL is a value like any other.

    PostgreSQL distributes the rows of hash partitions by the same functions, so their values never change.

    :param only: a condition; for rows that do not meet it the result is NULL.
    """
    hashed: sa.ColumnElement[int] = sa.func.hash_record_extended(sa.func.row(*columns), _SEED, type_=sa.BigInteger())
    # CREATE INDEX requires the parentheses.
    return hashed if only is None else Grouping(_CaseAsPrinted((only, hashed)))
