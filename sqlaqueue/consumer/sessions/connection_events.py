"""Event listeners of one connection, also where SQLAlchemy accepts none.

A connection of ``engine.execution_options(...)``, such as of a tenant with its own schema, refuses listeners in the
older versions of SQLAlchemy 2.0. There, one listener of the engine calls those of the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError

Listener = Callable[..., Any]

_listeners: WeakKeyDictionary[sa.Connection, list[tuple[str, Listener]]] = WeakKeyDictionary()
_engines: WeakKeyDictionary[sa.Engine, set[str]] = WeakKeyDictionary()


def listen(connection: sa.Connection, name: str, listener: Listener) -> None:
    """Call ``listener`` with each event of this name on this connection.

    :param listener: must not refer to the connection for longer than it is used, or it would never be collected.
    """
    try:
        event.listen(connection, name, listener)
    except InvalidRequestError:
        _listeners.setdefault(connection, []).append((name, listener))
        names = _engines.setdefault(connection.engine, set())
        if name not in names:
            names.add(name)
            event.listen(connection.engine, name, _caller(name))


def remove(connection: sa.Connection, name: str, listener: Listener) -> None:
    """Undo :func:`listen`."""
    of_connection = _listeners.get(connection, [])
    if (name, listener) in of_connection:
        of_connection.remove((name, listener))
    else:
        event.remove(connection, name, listener)


def _caller(name: str) -> Listener:
    def call(connection: sa.Connection, *arguments: Any) -> None:
        for of_name, listener in [*_listeners.get(connection, ())]:
            if of_name == name:
                listener(connection, *arguments)

    return call
