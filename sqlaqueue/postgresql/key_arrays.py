"""Arrays of keys as one parameter of a statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import TypeDecorator, TypeEngine


def key_array(element: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the type of an array of keys, for ``key = ANY(array)``; none of them is NULL."""
    return _array(element, nullable=False)


def nullable_array(element: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the type of an array of values, of which some may be NULL."""
    return _array(element, nullable=True)


def _array(element: TypeEngine[Any], *, nullable: bool) -> TypeEngine[Any]:
    if isinstance(element, sa.Integer) or (isinstance(element, sa.Uuid) and element.as_uuid):
        return TextArray(element, nullable=nullable)
    # Its elements may be lists, such as those of JSONB, which are no further dimension.
    return ARRAY(element, dimensions=1)


def numbered_rows(
    columns: Mapping[str, tuple[TypeEngine[Any], Sequence[Any] | None]], number: str
) -> sa.TableValuedAlias:
    """Return given values as a table, with the number of each row, from 1.

    One array for each column: a VALUES list would have a parameter for each value, and other SQL for each number of
    rows.
    """
    arrays = [
        sa.bindparam(name if values is None else None, list(values or ()), type_=_array(type_, nullable=True))
        for name, (type_, values) in columns.items()
    ]
    names = [sa.column(name, type_) for name, (type_, _) in columns.items()]
    rows: sa.TableValuedAlias = sa.func.unnest(*arrays).table_valued(
        *names, with_ordinality=number, name="sqlaqueue_given"
    )
    return rows.render_derived("sqlaqueue_given")


class _Array(ARRAY[Any]):
    """An array that can be printed for any dialect; for most of them SQLAlchemy would raise an error."""

    cache_ok = True


@compiles(_Array)
def _print_array(element: _Array, compiler: Any, **options: Any) -> str:
    return f"{compiler.process(element.item_type, **options)}[]"


@compiles(_Array, "postgresql")
def _render_array(element: _Array, compiler: Any, **options: Any) -> str:
    rendered: str = compiler.visit_ARRAY(element, **options)
    return rendered


_COMMA, _NULL = (sa.literal_column(text, sa.Text()) for text in ("','", "'NULL'"))


class TextArray(TypeDecorator[Sequence[Any]]):
    """An array of numbers or UUIDs that is sent as one text, and cast to an array by the server.

    psycopg adapts the elements of a list one by one; this takes a sixth of the time. The text is split before the cast,
    since a cast of a whole text to an array is no constant for the planner: a sequential scan would compare each row
    with all elements, one after the other, where it looks a constant up in a hash table.
    """

    impl = sa.Text
    cache_ok = True

    def __init__(self, element: TypeEngine[Any], *, nullable: bool) -> None:
        super().__init__()
        self.element, self.nullable = element, nullable

    def bind_expression(self, bindparam: sa.BindParameter[Any]) -> sa.ColumnElement[Any]:
        """Cast the text to an array."""
        return sa.cast(sa.func.string_to_array(bindparam, _COMMA, _NULL), _Array(self.element))

    def process_bind_param(self, value: Sequence[Any] | None, dialect: sa.Dialect) -> str | None:
        """Return the text of the elements."""
        if value is None:
            return None
        write = _integer if isinstance(self.element, sa.Integer) else _uuid
        written = ["NULL" if key is None and self.nullable else write(key) for key in value]
        return ",".join(written)


def _integer(key: Any) -> str:
    return str(int(key))


def _uuid(key: Any) -> str:
    return (key if isinstance(key, UUID) else UUID(key)).hex
