"""What has to be written otherwise for each type checker, or for each version of SQLAlchemy.

What is typed differently by SQLAlchemy 2.0 and 2.1 are SELECTs, and so :func:`sqlaqueue.claim`.

``session.execute(claim(Email, 10)).scalars().all()`` must be a ``Sequence[Email]`` to a type checker. The type of a
statement that returns one entity is spelled ``TypedReturnsRows[tuple[Email]]`` for SQLAlchemy 2.0 and
``TypedReturnsRows[Email]`` for 2.1, and no annotation can say "whichever is installed". So it is derived from the
type of :func:`sqlalchemy.select`, which each version annotates for itself: mypy and pyright solve the same
question by different means, hence the two branches.

A queue attribute (:data:`Role`) reads as its own type or Any: a class may define it again with the type that its table
has, such as an Enum or one with None, which type checkers allow only if the type that it replaces leaves that open.

At run time nothing of that exists.
"""

# Each checker meets the branch of the other one here, and would comment on it.
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
"""mypy takes a variable of this name for true, other checkers do not."""

# A SELECT of whatever columns: it has one type parameter in SQLAlchemy 2.0, as many as columns in 2.1.
if MYPY:
    AnySelect: TypeAlias = Select[Any]
else:
    AnySelect: TypeAlias = Select

if TYPE_CHECKING:
    if MYPY:

        def _returning(
            _: Callable[[type[T]], TypedReturnsRows[R]],  # type: ignore[type-var, unused-ignore] # R is a tuple in 2.0 only
        ) -> Callable[[type[T] | TypedReturnsRows[R], int], TypedReturnsRows[R]]:  # type: ignore[type-var, unused-ignore] # R is a tuple in 2.0 only
            raise NotImplementedError

        claim = _returning(select)
    else:

        @overload
        def claim(
            model: type[T], n: int, /, *, _: Callable[[type[T]], TypedReturnsRows[R]] = select
        ) -> TypedReturnsRows[R]: ...
        @overload
        def claim(model: TypedReturnsRows[R], n: int, /) -> TypedReturnsRows[R]: ...
        def claim(model: Any, n: int, /, **_: Any) -> Any: ...

    class _Role(Generic[T]):
        @overload
        def __get__(self, instance: None, owner: Any) -> InstrumentedAttribute[T]: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> T | Any: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...
        def __set__(self, instance: Any, value: SQLCoreOperations[T] | T) -> None: ...

    # mypy compares what can be read from a class's own attribute and from the one that it replaces, and knows nothing
    # of a SELECT of a union with Any; pyright compares the declarations. It takes the last one of these two.
    if MYPY:
        Role: TypeAlias = _Role[T]
    else:
        Role: TypeAlias = Mapped[T] | Any
