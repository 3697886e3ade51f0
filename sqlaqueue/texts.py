"""Times, durations and lists as texts, suggestions for errors, and texts of others without control characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units, ``-`` for None."""
    if seconds is None:
        return "-"
    left = int(max(seconds, 0))
    parts: list[str] = []
    for unit, size in _UNITS:
        number, left = divmod(left, size)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def moment_text(moment: datetime | None) -> str:
    """Return a moment to the second, in UTC if it has a time zone; ``an unknown time`` for None."""
    if moment is None:
        return "an unknown time"
    if moment.tzinfo is None:
        return moment.isoformat(" ", "seconds")
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(' ', 'seconds')} UTC"


def printable(text: str) -> str:
    """Return a text with its control characters escaped, as it may be printed and logged."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


TRACEBACK_HEAD = "Traceback (most recent call last):"
_TRACEBACK = re.compile(rf"\n(?=(?:[ ]*\+ Exception Group )?{re.escape(TRACEBACK_HEAD)})")


def split_error(text: str | None) -> tuple[str, str | None]:
    """Return the text of ``last_error`` above the traceback, and the traceback, or None if it has none."""
    error, *traceback = _TRACEBACK.split(text or "", maxsplit=1)
    return error, traceback[0] if traceback else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suffix for an error that suggests similar names, empty if there are none."""
    similar = get_close_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def states_text(one: str, several: str, names_by_state: dict[str, Sequence[str]]) -> str:
    """Return in which states things are, such as ``the indexes a, b are missing and the index c is invalid``."""
    return " and ".join(
        f"the {one} {names[0]} is {state}" if len(names) == 1 else f"the {several} {', '.join(names)} are {state}"
        for state, names in names_by_state.items()
        if names
    )


def older_models(*, worked: bool) -> str:
    """Return what to do about a column or a table that this process needs and the database lacks.

    :param worked: whether this process has found it before.
    """
    if worked:
        return (
            "it was there before, so a newer version of the program has changed the database: restart this process "
            "with that version"
        )
    return (
        "if a newer version of the program has changed the database, restart this process with that version; "
        "otherwise run `alembic upgrade head`"
    )
