"""Engines for the option ``--url`` with a server of MariaDB."""

from __future__ import annotations

import importlib.util
from typing import Any

import sqlalchemy as sa

from sqlaqueue.cli.shared.errors import InputError
from sqlaqueue.mariadb import prepare

BACKENDS = {"mariadb", "mysql"}
_EXAMPLE = "mariadb+pymysql://user:password@host/database"
_SYNC, _ASYNC = "pymysql", "asyncmy"


def checked_url(url: sa.URL) -> sa.URL:
    """Refuse drivers that the library does not support.

    :raises InputError: with an example.
    """
    _, plus, driver = url.drivername.partition("+")
    if plus and driver not in {_SYNC, _ASYNC}:
        raise InputError(f"--url: the driver {driver!r} is not supported; write it as {_EXAMPLE}")
    return url


def engine_for_server(url: sa.URL, *, needs_async: bool | None, connections: int | None, timeout: int) -> Any:
    """Return an Engine or AsyncEngine that is prepared.

    :param timeout: how many seconds to wait for a connection.
    :raises InputError: if the driver is not installed.
    """
    is_async = url.drivername.endswith(_ASYNC) if needs_async is None else needs_async
    driver = _ASYNC if is_async else _SYNC
    if importlib.util.find_spec(driver) is None:
        kind = "async" if is_async else "sync"
        raise InputError(f"--url: {kind} handlers need {driver}: pip install 'sqlaqueue[{driver}]'")
    options: dict[str, Any] = {"connect_args": {"connect_timeout": timeout}}
    if connections is not None:
        options |= {"pool_size": connections}
    url = url.set(drivername=f"{url.get_backend_name()}+{driver}")
    engine: Any
    if is_async:
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet

        engine = create_async_engine(url, **options)
    else:
        engine = sa.create_engine(url, **options)
    prepare(engine)
    return engine
