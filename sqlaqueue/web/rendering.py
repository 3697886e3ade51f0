"""Templates, and how values and notices are written in them."""

from __future__ import annotations

import functools
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from starlette.datastructures import QueryParams

from sqlaqueue.queue.run import key_text
from sqlaqueue.texts import split_error

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
SHORT = 200
"""The number of characters of a value in a list."""


def html(template: str, *values: Any) -> Markup:
    """Return HTML with escaped values; ``Markup.format()`` would take a third of the time of a page with a chart."""
    return Markup(template.format(*map(escape, values)))  # noqa: S704 - the values are escaped


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"  # noqa: RUF001 - an en dash stands for no value


def capped(value: int | None, limit: int) -> str:
    return f"{limit:,}+" if value is not None and value >= limit else number(value)


def duration(value: float | timedelta | None) -> str:
    if value is None:
        return number(None)
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{sign}{seconds:.1f} s" if seconds < 10 else f"{sign}{seconds:.0f} s"  # noqa: PLR2004 - two digits
    units = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
    unit, name, smaller, smaller_name = next(each for each in units if seconds >= each[0])
    large, rest = divmod(int(seconds), unit)
    return f"{sign}{large} {name}" + (f" {rest // smaller} {smaller_name}" if rest // smaller else "")


def size(value: int) -> str:
    amount, units = float(value), ["bytes", "kB", "MB", "GB", "TB"]
    while amount >= 1024 and len(units) > 1:  # noqa: PLR2004 - as PostgreSQL counts
        amount, units = amount / 1024, units[1:]
    return f"{value} bytes" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def moment(value: datetime | None) -> str | Markup:
    """Write a moment in UTC, in an element that the browser's script shows in the time zone of the reader."""
    if value is None:
        return number(None)
    if value.tzinfo is None:
        return f"{value:%Y-%m-%d %H:%M:%S}"
    utc = value.astimezone(UTC)
    return html('<time datetime="{}">{} UTC</time>', utc.isoformat(), f"{utc:%Y-%m-%d %H:%M:%S}")


def short(text: str, length: int = SHORT) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


_FOLDER = Path(__file__).parent
STATIC = _FOLDER / "static"


class Renderer:
    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,  # so that a value is never HTML
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            each.__name__: each for each in (number, capped, duration, moment, short, size, key_text, split_error)
        }
        self.static_files = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.is_file()}
        """The contents of the static files by name; no other file can be asked for."""
        self.static_version = hashlib.sha256(b"".join(self.static_files.values())).hexdigest()[:12]
        """Changes with their contents, so that browsers can keep them for ever."""

    def render(self, template: str, **values: Any) -> str:
        return self._environment.get_template(template).render(**values)


@functools.cache
def shared_renderer() -> Renderer:
    """Return the one of this process: all dashboards have the same templates, which take a second to compile."""
    return Renderer()


_TEXTS = {
    "requeued": ("{} job is pending again.", "{} jobs are pending again."),
    "duplicates": ("{} job has a duplicate and was not requeued.", "{} jobs have a duplicate and were not requeued."),
    "left": ("{} job was left as it was; try again later.", "{} jobs were left as they were; try again later."),
    "rescued": ("{} job was rescued.", "{} jobs were rescued."),
    "cancelled": ("{} job was cancelled.", "{} jobs were cancelled."),
    "asked": ("{} processing job was asked to stop.", "{} processing jobs were asked to stop."),
    "missing": ("{} job had finished already.", "{} jobs had finished already."),
    "purged": ("{} job was deleted.", "{} jobs were deleted."),
    "unchanged": ("{} job was not changed.", "{} jobs were not changed."),
    "remaining": ("{} more job matches; repeat the action.", "{} more jobs match; repeat the action."),
    "none_selected": ("No job is selected.",) * 2,
    "edited": ("The job was changed.", "The jobs were changed."),
    "paused": ("The queue is paused: no job begins until it is resumed.",) * 2,
    "resumed": ("The queue is resumed: its jobs begin again.",) * 2,
    "quiet_asked": ("The Consumer was asked to claim no more jobs.",) * 2,
    "resume_asked": ("The Consumer was asked to claim jobs again.",) * 2,
    "stop_asked": ("The Consumer was asked to stop.",) * 2,
    "schedule_run": ("The schedule will be run by the next process that fires schedules.",) * 2,
    "schedule_paused": ("The schedule is paused.",) * 2,
    "schedule_resumed": ("The schedule is resumed.",) * 2,
}
"""The texts after an action, singular and plural. URLs name them by code, so that a link cannot show another text."""

_MOST = 6


def notices_in(query: QueryParams) -> list[str]:
    """Return the notices that a URL names; what is malformed is left out."""
    found = []
    for each in query.getlist("notice")[:_MOST]:
        code, _, number = each.partition(":")
        if code in _TEXTS and number.isascii() and number.isdigit() and len(number) <= 18:  # noqa: PLR2004 - 64 bits
            singular, plural = _TEXTS[code]
            found.append((singular if int(number) == 1 else plural).format(f"{int(number):,}"))
    return found
