"""As of which version of sqlaqueue each of its own tables is, and which programs may use it: two versions in a comment.

A deployment lets two versions of a program share a database. Alembic and ``create_all()`` write the comment of a table,
and a worker compares it with its own version when it starts and with each heartbeat. So one that is too old stops, and
says why, instead of failing at each statement. SQLite has no comments: its file belongs to one machine, and the checks
of columns have to do.

To change a table in a new minor version:

- Only add to it: a column with a default or NULL, an index, a table. Then the workers of the version before go on, and
  the second number stays. The first one becomes the new version, so that its workers do not start before the migration.
- Never change what a column means. Add another one, and remove the old one in a later version, when no worker of the
  supported versions names it. That raises the second number. The statements of workers that are older than that fail
  from the moment of the migration, so they do no harm until their next heartbeat stops them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import sqlalchemy as sa

from sqlaqueue._version import __version__
from sqlaqueue.queue.names import (
    ATTEMPT,
    CONSUMERS,
    CONTROL,
    CRASH_JOURNAL,
    DEAD_LETTER,
    MESSAGES,
    MINUTE,
    RATE,
    SCHEDULE,
    TICK,
    WAITS,
)

Version = tuple[int, int]
"""A minor version. A patch never changes a table."""


class TableVersion(NamedTuple):
    """As of which version a table is, and the oldest version that may use it."""

    as_of: Version
    usable_from: Version


_FIRST = TableVersion((0, 1), (0, 1))
"""That of a table without a comment: 0.1.0 wrote none."""

TABLE_VERSIONS: dict[str, TableVersion] = {
    ATTEMPT: _FIRST,
    CONSUMERS: _FIRST,
    CONTROL: _FIRST,
    CRASH_JOURNAL: _FIRST,
    DEAD_LETTER: _FIRST,
    MESSAGES: _FIRST,
    MINUTE: _FIRST,
    RATE: _FIRST,
    SCHEDULE: _FIRST,
    TICK: _FIRST,
    WAITS: _FIRST,
}
"""The versions of the tables as this version of sqlaqueue creates them."""

_NUMBER = r"(\d+)\.(\d+)(?:\.\d+)*"
_COMMENT = re.compile(rf"sqlaqueue, as of {_NUMBER}, for {_NUMBER} and newer")


def table_comment(kind: str) -> str:
    """Return the comment of one of the library's tables, by its key in :data:`TABLE_VERSIONS`."""
    as_of, usable_from = TABLE_VERSIONS[kind]
    return f"sqlaqueue, as of {version_text(as_of)}, for {version_text(usable_from)} and newer"


def table_version(comment: str | None) -> TableVersion:
    """Return what the comment of a table says, that of the first version if it says nothing."""
    # Somebody may have written something before it.
    found = _COMMENT.search(comment or "")
    if found is None:
        return _FIRST
    numbers = [int(each) for each in found.groups()]
    return TableVersion((numbers[0], numbers[1]), (numbers[2], numbers[3]))


def minor_version(text: str) -> Version | None:
    """Return the minor version of a version such as ``0.2.0.dev0``; None if the text is none."""
    found = re.match(_NUMBER, text)
    return None if found is None else (int(found[1]), int(found[2]))


def version_text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def too_new(comments: Mapping[sa.Table, str | None]) -> str | None:
    """Return why this process must not use one of the tables, as a newer version has changed it; None if it may.

    :param comments: the comments that the tables have in the database.
    """
    own = minor_version(__version__)
    newer = [each for each in _versions(comments) if own is not None and own < each[1].usable_from]
    if not newer:
        return None
    # Of several tables the one that asks for most: what may use it may use the others.
    table, found = max(newer, key=lambda each: (each[1].usable_from, each[1].as_of))
    return (
        f"the table {table.fullname} was migrated to sqlaqueue {version_text(found.as_of)}, for workers of "
        f"{version_text(found.usable_from)} and newer, and this process has sqlaqueue {__version__}: start the "
        f"version of the program that has sqlaqueue {version_text(found.as_of)}"
    )


def too_old(comments: Mapping[sa.Table, str | None]) -> str | None:
    """Return why this process cannot use one of the tables, as it has not been migrated yet; None if it can."""
    for table, found in _versions(comments):
        needed = table_version(table.comment).as_of
        if found.as_of < needed:
            return (
                f"the table {table.fullname} is as of sqlaqueue {version_text(found.as_of)}, and this process, which "
                f"has sqlaqueue {__version__}, needs it as of {version_text(needed)}"
            )
    return None


def refuse_to_migrate(name: str, comment: str | None) -> str | None:
    """Return why this version must not write a migration of a table, as a newer one has migrated it; None if it may."""
    own, as_of = minor_version(__version__), table_version(comment).as_of
    if own is None or as_of <= own:
        return None
    return (
        f"the table {name} was migrated to sqlaqueue {version_text(as_of)}, and this is sqlaqueue {__version__}, whose "
        f"migration would undo that; use sqlaqueue {version_text(as_of)} here"
    )


def _versions(comments: Mapping[sa.Table, str | None]) -> Iterator[tuple[sa.Table, TableVersion]]:
    """Yield the tables with what their comments say; only those of the library have one in the models."""
    for table, comment in comments.items():
        if _COMMENT.match(table.comment or ""):
            yield table, table_version(comment)


def stopped_by(tables: Iterable[sa.Table], version: str) -> bool:
    """Return whether a worker of a version must not use these tables, as the models of this process declare them."""
    found = minor_version(version)
    return found is not None and any(found < table_version(table.comment).usable_from for table in tables)
