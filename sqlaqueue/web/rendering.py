"""Templates, and how values and notices are written in them."""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

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


ZONE_COOKIE = "sqlaqueue_zone"
SERVER = "server"
"""The name of the zone of the server's process."""

_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}", re.ASCII)


@dataclass(frozen=True)
class Zone:
    """The time zone in which a page shows all times, but those of schedules."""

    name: str = SERVER
    info: tzinfo | None = None
    """None for that of the server's process."""

    @property
    def label(self) -> str:
        return self.name if self.info is not None else datetime.now(UTC).astimezone().tzname() or "server time"

    def local(self, value: datetime) -> datetime:
        try:
            return value.astimezone(self.info)
        except (OverflowError, OSError, ValueError):  # at the ends of the years that Python has
            return value.astimezone(UTC)


def zone_of(name: str) -> Zone | None:
    """Return the zone of a name such as ``Europe/Berlin``; None without an error."""
    if name == SERVER:
        return Zone()
    if name == "UTC":
        return Zone(name, UTC)
    try:
        return Zone(name, ZoneInfo(name)) if _ZONE_NAME.fullmatch(name) else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


ZONE: ContextVar[Zone] = ContextVar("sqlaqueue_dashboard_zone", default=Zone())  # noqa: B039 - it cannot be changed
"""That of the page that is being made."""


def ago(value: datetime, now: datetime | None = None) -> str:
    """Return how long ago a moment was, or in how long it will be, in its largest unit; the script does the same."""
    seconds = ((now or datetime.now(UTC)) - value).total_seconds()
    units = ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"), (1, "s"))
    found = next(((size, name) for size, name in units if abs(seconds) >= size), None)
    if found is None:
        return "now"
    text = f"{int(abs(seconds) // found[0])} {found[1]}"
    return f"{text} ago" if seconds > 0 else f"in {text}"


def moment(value: datetime | None, zone: str | None = None) -> str | Markup:
    """Write a moment as ``3 min ago · 14:02:11``, with the date unless it is today, in the zone of the page.

    :param zone: the name of another zone, which is written behind it.
    """
    if value is None:
        return number(None)
    if value.tzinfo is None:
        return f"{value:%Y-%m-%d %H:%M:%S}"
    own = ZONE.get() if zone is None else zone_of(zone) or Zone("UTC", UTC)
    local = own.local(value)
    is_today = local.date() == own.local(datetime.now(UTC)).date()
    text = f"{local:%H:%M:%S}" if is_today else f"{local:%Y-%m-%d %H:%M:%S}"
    return html(
        '<time datetime="{}" title="{} {}"><span data-ago>{}</span> · {}{}</time>',
        value.astimezone(UTC).isoformat(),
        f"{local:%Y-%m-%d %H:%M:%S}",
        own.label,
        ago(value),
        text,
        "" if zone is None else f" {own.label}",
    )


def clock_text(value: datetime, *, with_date: bool = False) -> str:
    """Write the time of a bar of a chart."""
    local = ZONE.get().local(value)
    day, seconds = "%Y-%m-%d " if with_date else "", ":%S" if local.second else ""
    return f"{local.strftime(f'{day}%H:%M{seconds}')} {local.tzname()}"


def short(text: str, length: int = SHORT) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


_UNSEEN = (
    "\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, but tabs and line breaks
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions of texts
    "\u200b\u2028\u2029\u2060-\u2064\ufeff"  # spaces without a width, and line breaks that are none in HTML
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u206a-\u206f\u3164\uffa0\ufff9-\ufffb"  # others without a width
    "\U000e0000-\U000e007f"  # tags: a second alphabet, in which a text can be hidden
    "\ud800-\udfff"  # halves of surrogate pairs, which cannot be sent
)
"""Characters that are not seen themselves, and change how others are seen, or what is copied."""

_ONE_UNSEEN = re.compile(f"[{_UNSEEN}]")
_EXACT_OR_UNSEEN = re.compile(rf'(value="[^"]*"|<textarea[^>]*>[^<]*</textarea>)|[{_UNSEEN}]')


def visible(page: str) -> str:
    """Return a page with escapes, as JSON has them, for characters that are not seen.

    With them a value could be read as another one, or seem to be a part of the page. What a form sends stays as it is:
    no text of a job has a quote or a bracket, as these are escaped.
    """
    # Few pages have any, and the longer expression takes milliseconds.
    if _ONE_UNSEEN.search(page) is None:
        return page
    shown = _EXACT_OR_UNSEEN.sub(lambda found: found[1] or _escaped(found[0]), page)
    # A form of JSON may have half a pair of surrogates, which no text in UTF-8 has.
    return shown.encode("utf-8", "backslashreplace").decode()


def visible_json(text: str) -> str:
    """Return the same for JSON, in which the escapes mean the characters."""
    return _ONE_UNSEEN.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    # JSON has two escapes for one of the higher planes, as UTF-16 has.
    units = struct.iter_unpack(">H", character.encode("utf-16-be", "surrogatepass"))
    return "".join(f"\\u{unit:04x}" for (unit,) in units)


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
            each.__name__: each for each in (number, capped, duration, moment, ago, short, size, key_text, split_error)
        }
        self.static_files = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.is_file()}
        """The contents of the static files by name; no other file can be asked for."""
        self.static_version = hashlib.sha256(b"".join(self.static_files.values())).hexdigest()[:12]
        """Changes with their contents, so that browsers can keep them for ever."""

    def render(self, template: str, **values: Any) -> str:
        return visible(self._environment.get_template(template).render(**values))


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
    "undone": ("{} job is as it was before.", "{} jobs are as they were before."),
    "left_alone": (
        "{} job was left as it is: it has run, or was changed, since.",
        "{} jobs were left as they are: they have run, or were changed, since.",
    ),
    "gone": ("{} job does not exist any more.", "{} jobs do not exist any more."),
    "refused": (
        "The database refused to change {} job; a duplicate of it may exist by now.",
        "The database refused to change {} jobs; duplicates of them may exist by now.",
    ),
    "not_stored": ("This could not be written to the table of the audit; the log of the server has it, and says why.",)
    * 2,
    "none_selected": ("No job is selected.",) * 2,
    "changed": ("{} job was changed.", "{} jobs were changed."),
    "edited": ("The job was changed.", "The jobs were changed."),
    "enqueued": ("The job was enqueued.", "The jobs were enqueued."),
    "paused": ("The queue is paused: no job starts until it is resumed.",) * 2,
    "resumed": ("The queue is resumed: its jobs start again.",) * 2,
    "resumed_since": ("The queue is not paused since then any more, so nothing was changed.",) * 2,
    "quiet_asked": ("The Consumer was asked to claim no more jobs.",) * 2,
    "resume_asked": ("The Consumer was asked to claim jobs again.",) * 2,
    "stop_asked": ("The Consumer was asked to stop.",) * 2,
    "schedule_added": ("The schedule was added.",) * 2,
    "schedule_changed": ("The schedule was changed.",) * 2,
    "schedule_unchanged": ("The schedule is as it was.",) * 2,
    "schedule_removed": ("The schedule was removed.",) * 2,
    "schedule_reset": ("The schedule is as the program declares it.",) * 2,
    "schedule_run": ("The schedule will be run by the next process that fires schedules.",) * 2,
    "schedule_paused": ("The schedule is paused.",) * 2,
    "schedule_resumed": ("The schedule is resumed.",) * 2,
}
"""The texts after an action, singular and plural. URLs name them by code, so that a link cannot show another text."""

_MOST = 6


def numbers_in(query: QueryParams, code: str) -> list[int]:
    """Return the numbers of the notices of one code that a URL names, such as the id of what was done."""
    given = (each.partition(":") for each in query.getlist("notice")[:_MOST])
    return [int(number) for name, _, number in given if name == code and _is_number(number)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18  # noqa: PLR2004 - 64 bits


class Notice(NamedTuple):
    text: str
    is_warning: bool


_WARNINGS = {"not_stored"}


def notices_in(query: QueryParams) -> list[Notice]:
    """Return the notices that a URL names; what is malformed is left out."""
    found = []
    for each in query.getlist("notice")[:_MOST]:
        code, _, number = each.partition(":")
        if code in _TEXTS and _is_number(number):
            singular, plural = _TEXTS[code]
            text = (singular if int(number) == 1 else plural).format(f"{int(number):,}")
            found.append(Notice(text, code in _WARNINGS))
    return found
