"""Refuses a file in a forked child whose parent has it open.

SQLite keeps in the memory of a process which locks the process has on a file. A child inherits that memory, but not the
locks: its connections, new ones as well, would take no lock that the parent had at the fork, or wait for one that is
never released. So two processes could write at the same time, or one could wait for ever.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.engines.notifications import database_of
from sqlaqueue.exc import ConfigurationError

_open: Counter[str] = Counter()
"""The number of connections of prepared engines, by the path of the file."""

_refused: dict[str, int] = {}
"""The files that a parent had open at a fork, with its process id."""


def refuse_files_of_parent(engine: sa.Engine) -> None:
    """Let an engine refuse its file in a child that is forked while a prepared engine has it open.

    :raises ConfigurationError: by the engine, when it connects, executes a statement or commits in such a child.
    """
    path = database_of(engine)
    files = {path} if isinstance(path, str) else set[str]()

    def opened(connection: Any, *_: Any) -> None:
        if not isinstance(path, str):
            # The URL says nothing of what creator= opens.
            files.update(_files_of(connection))
        for file in files:
            _open[file] += 1
        check()

    def closed(*_: Any) -> None:
        for file in files:
            _open[file] -= 1

    def check(*_: Any) -> None:
        # Empty but in a child.
        for file in files & _refused.keys():
            msg = (
                f"process {os.getpid()} was forked while process {_refused[file]} had connections to {file}, whose "
                "locks SQLite keeps by process; start it by multiprocessing's spawn or by subprocess, or call "
                "engine.dispose() before the fork"
            )
            raise ConfigurationError(msg)

    event.listen(engine, "connect", opened)
    event.listen(engine, "close", closed)
    event.listen(engine, "close_detached", closed)
    for name in ("do_connect", "before_cursor_execute", "commit"):
        event.listen(engine, name, check)


def _files_of(connection: Any) -> list[str]:
    """Return the file of a connection; none for a database in memory, of which a child has its own copy."""
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA database_list")
        return [os.path.realpath(row[2]) for row in cursor.fetchall() if row[1] == "main" and row[2]]
    finally:
        cursor.close()


def _after_fork_in_child() -> None:
    _refused.update((path, os.getppid()) for path, number in _open.items() if number > 0)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
