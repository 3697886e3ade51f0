"""Types that differ between type checkers, or between versions of SQLAlchemy.

``session.execute(claim(Email, 10)).scalars().all()`` must have the type ``Sequence[Email]``. A statement that returns
one entity has the type ``TypedReturnsRows[tuple[Email]]`` in SQLAlchemy 2.0 and ``TypedReturnsRows[Email]`` in 2.1, and
no annotation means the one of the installed version. The type of :func:`sqlaqueue.claim` is therefore derived from that
of :func:`sqlalchemy.select`. mypy and pyright need different code for this.

The type of a queue attribute, :data:`Role`, is a union with Any, so that a class may redefine the attribute with the
type of its own column, such as an Enum or an optional type.

None of these types exists at run time.
"""

# Each checker reads the branch of the other as well, and would report errors in it.
# pyright: reportAssignmentType=false, reportUnnecessaryTypeIgnoreComment=false
# pyright: reportInvalidTypeArguments=false, reportRedeclaration=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from sqlalchemy import Select, select
from sqlalchemy.orm import InstrumentedAttribute, Mapped
from sqlalchemy.sql.elements import SQLCoreOperations
from sqlalchemy.sql.selectable import TypedReturnsRows

T = TypeVar("T")
R = TypeVar("R")

MYPY = False
"""mypy treats a variable of this name as true; other checkers do not."""

# A SELECT of any columns. Select has one type parameter in SQLAlchemy 2.0, and one for each column in 2.1.
if MYPY:
    AnySelect: TypeAlias = Select[Any]
else:
    AnySelect: TypeAlias = Select

if TYPE_CHECKING:
    if MYPY:
        from mypy_extensions import Arg  # mypy brings it along

        def _returning(
            _: Callable[[type[T]], TypedReturnsRows[R]],  # type: ignore[type-var, unused-ignore] # R is a tuple in 2.0 only
        ) -> Callable[[type[T] | TypedReturnsRows[R], Arg(int, "n")], TypedReturnsRows[R]]:  # type: ignore[type-var, unused-ignore] # R is a tuple in 2.0 only
            raise NotImplementedError

        claim = _returning(select)
    else:

        @overload
        def claim(
            model: type[T], /, n: int, *, _: Callable[[type[T]], TypedReturnsRows[R]] = select
        ) -> TypedReturnsRows[R]: ...
        @overload
        def claim(model: TypedReturnsRows[R], /, n: int) -> TypedReturnsRows[R]: ...
        def claim(model: Any, /, n: int, **_: Any) -> Any: ...

    class _Role(Generic[T]):
        @overload
        def __get__(self, instance: None, owner: Any) -> InstrumentedAttribute[T]: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> T | Any: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...
        def __set__(self, instance: Any, value: SQLCoreOperations[T] | T) -> None: ...

    # mypy compares the types that a redefined attribute and the original return, and does not accept a union with Any
    # in a SELECT. pyright compares the declarations, and uses the last of these two.
    if MYPY:
        Role: TypeAlias = _Role[T]
    else:
        Role: TypeAlias = Mapped[T] | Any
