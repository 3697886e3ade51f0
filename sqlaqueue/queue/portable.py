"""Expressions that are written for PostgreSQL's planner, and their plain form for other engines.

PostgreSQL compiles what it is given and never looks at the plain form, so its statements are the same with and without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.sql.elements import ClauseElement

Element = TypeVar("Element", bound=ClauseElement)

# In the instance's dictionary, which SQLAlchemy copies whenever it copies an element.
_PLAIN = "_sqlaqueue_plain_form"


def with_plain_form(element: Element, make: Callable[[], ClauseElement]) -> Element:
    """Record how an expression reads without regard to the planner of PostgreSQL.

    :param make: returns an expression with the same result; it is called when another engine compiles the statement.
        Its parameters that have values must be those of ``element``: SQLAlchemy caches the statement by ``element``.
    """
    element.__dict__[_PLAIN] = make
    return element


def plain_form(element: ClauseElement) -> ClauseElement | None:
    """Return the plain form of an expression; None for an expression that has only one form."""
    make: Callable[[], ClauseElement] | None = element.__dict__.get(_PLAIN)
    return None if make is None else make()
