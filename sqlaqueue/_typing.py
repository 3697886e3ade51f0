"""What is typed differently by SQLAlchemy 2.0 and 2.1: SELECTs, and so :func:`sqlaqueue.claim`.

``session.execute(claim(Email, 10)).scalars().all()`` must be a ``Sequence[Email]`` to a type checker. The type of a
statement that returns one entity is spelled ``TypedReturnsRows[tuple[Email]]`` for SQLAlchemy 2.0 and
``TypedReturnsRows[Email]`` for 2.1, and no annotation can say "whichever is installed". So it is derived from the
type of :func:`sqlalchemy.select`, which each version annotates for itself: mypy and pyright solve the same
question by different means, hence the two branches. At run time nothing of that exists.
"""

# Each checker meets the branch of the other one here, and would comment on it.
# pyright: reportAssignmentType=false, reportUnnecessaryTypeIgnoreComment=false
# pyright: reportInvalidTypeArguments=false, reportRedeclaration=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from sqlalchemy import Select, select
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
