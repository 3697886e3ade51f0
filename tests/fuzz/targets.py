"""What reads texts of strangers: each with valid inputs, and with the errors that it documents."""

import base64
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from urllib.parse import parse_qsl

import click
import sqlalchemy as sa

from sqlaqueue import Schedule
from sqlaqueue.admin.jobs import key_parts
from sqlaqueue.cli.database import parse_url
from sqlaqueue.cli.http import parse_address
from sqlaqueue.cli.output import DURATION, SIZE
from sqlaqueue.consumer.maintenance.firing import GroupState
from sqlaqueue.consumer.notifications.polls import PollSchedule
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.notify_payloads import parse
from sqlaqueue.schedules.recurrence import Recurrence
from sqlaqueue.schedules.schedule import from_json, schedule_groups
from sqlaqueue.web.data.edit_fields import WrongValue, field_value, fields_of
from sqlaqueue.web.data.job_columns import JobColumns, columns_of, indented
from sqlaqueue.web.data.job_filters import parse_filter
from sqlaqueue.web.data.job_pages import parse_request, position_of
from sqlaqueue.web.data.job_sources import JobOrder, OrderColumn
from sqlaqueue.web.data.reader import ParameterError
from sqlaqueue.web.errors import PageError
from sqlaqueue.web.links import selection_of
from sqlaqueue.web.rendering import Zone, visible_json, zone_of
from sqlaqueue.web.search import parse_line, with_added
from sqlaqueue.web.security import check_host
from tests.web.engines import make_queues


@dataclass(frozen=True)
class Target:
    """What reads a text.

    :param errors: those that it documents, each with a plain message.
    """

    read: Callable[[str], object]
    corpus: Sequence[str]
    errors: tuple[type[Exception], ...] = ()
    weight: int = 10
    """Its share of the inputs: less for what takes long."""


@functools.cache
def _columns() -> JobColumns:
    return columns_of(spec_of(make_queues()[0]), lambda _, name: name == "secret")


def _zone() -> Zone:
    return Zone("UTC", UTC)


def _read_by_one(documented: type[Exception], *readers: Callable[[], object]) -> None:
    """Call all readers, and raise the error of the last one that refuses, if all of them do."""
    errors = []
    for read in readers:
        try:
            read()
        except documented as error:
            errors.append(error)
    if len(errors) == len(readers):
        raise errors[-1]


# -- notifications -----------------------------------------------------------------------------------------------------


def receive_notification(text: str) -> None:
    """Parse a notification, and let a Consumer and a process with schedules take it."""
    payload = parse(text)
    if payload is not None:
        _consumer().receive(payload)
        _consumer().next_poll()
        _schedules().receive(payload)
        str(payload)


@functools.cache
def _consumer() -> PollSchedule:
    return PollSchedule("me", lambda: 60.0, lambda: None, lambda: None, rescue=lambda peers: 10.0 * peers)


@functools.cache
def _schedules() -> GroupState:
    schedule = Schedule("nightly", make_queues()[0], every=60, values={"recipient": "a"})
    state = GroupState(schedule_groups([schedule], "test")[0], lambda: None)
    state.id = "host"
    return state


NOTIFICATIONS = [
    *[
        "pending 771 3 0",
        "pending 771 1 1893456000.25 more",
        "claimed 2 771 772@1893456000.25",
        "claimed 1000000000 771",
    ],
    *["heartbeat host.1", "deregistered host.1.a", "poll", "quarantined", "rescued", "cancel_requested", "unwatched"],
    *['wait host.1.b ["1", "2"]', 'settled ["1", "2"]', 'settled ["a b", "\\u00e9"]', "consumer_requested"],
]

# -- the dashboard -----------------------------------------------------------------------------------------------------


@functools.cache
def _order() -> JobOrder:
    table = spec_of(make_queues()[0]).table
    kept = [OrderColumn(table.c[name], False, False, True) for name in ("day", "at", "reference", "recipient", "total")]  # noqa: FBT003 - its fields
    key = OrderColumn(table.c.id, False, False, False)  # noqa: FBT003 - its fields
    return JobOrder("day", False, (), tuple(kept), (key,))  # noqa: FBT003 - its fields


def _cursor(*position: str | None) -> str:
    signature = f"day {' '.join(f'{each.column.name}>' for each in _order().all)}"
    return base64.urlsafe_b64encode(json.dumps([signature, *position]).encode()).decode().rstrip("=")


def read_cursor(text: str) -> object:
    return position_of(_order(), text, "after")


def read_content_of_cursor(text: str) -> object:
    """Read a cursor whose content is changed, not its encoding, which hides most changes."""
    return read_cursor(base64.urlsafe_b64encode(text.encode()).decode().rstrip("="))


def _content(cursor: str) -> str:
    return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()


CURSORS = [
    _cursor("2030-01-01", "2030-01-01T00:00:00+00:00", "6f1d7c6e-9d3f-4d52-8f0e-3a0e4bd2f4a1", "ada", "1.5", "1"),
    _cursor(None, "infinity", None, None, "NaN", "1"),
    _cursor("0044-03-15 BC", "-infinity", None, "é", None),
]


def read_search(text: str) -> None:
    parse_line(_columns(), text, _zone())
    with_added(_columns(), [("q", text)], _zone())


SEARCHES = [
    "state:failed error:ValueError",
    'subject:"two words" total:>=5 day:2030-01-01..2030-02-01',
    "at:1h kind:RECEIPT urgent:true payload.a.0:5 recipient:ada*",
    "reference:6f1d7c6e-9d3f-4d52-8f0e-3a0e4bd2f4a1 weight:~1 subject:!null",
    "timed out while sending",
]


def read_query(text: str) -> None:
    """Read the query of a list, of an export, of the API, and of a form of an action."""
    try:
        pairs = parse_qsl(text, errors="strict", keep_blank_values=True, max_num_fields=200)
    except ValueError:
        return
    _read_by_one(
        ParameterError,
        partial(parse_request, _columns(), pairs),
        partial(parse_filter, _columns(), pairs),
        partial(with_added, _columns(), pairs, _zone()),
        partial(selection_of, _columns(), "requeue", pairs),
    )


QUERIES = [
    "state=failed&error=ValueError&sort=-run_at&columns=id,recipient",
    "f.total.min=1.5&f.day.last=7d&f.payload.json.a.0=5&f.urgent=true&f.subject.null=yes",
    f"state=pending&after={CURSORS[0]}&f.at.max=2030-01-01T00:00Z",
    "key=1&key=2&action=requeue&until=2030-01-01T00:00:00%2B00:00",
    "all=1&state=failed&until=2030-01-01T00:00:00%2B00:00&from=1&most=1000",
    "q=total:5&add=f.kind&value=RECEIPT&time=at&within=1h&since=2030-01-01&until=2030-01-02",
    "f.reference=6f1d7c6e-9d3f-4d52-8f0e-3a0e4bd2f4a1&f.blob=00ff&f.weight=1e5&job=5&message=timeout",
]


def read_fields(text: str) -> None:
    """Read a text as the value of each field of a form that edits a job."""
    fields = fields_of(_columns(), spec_of(make_queues()[0]).mapper)
    _read_by_one(WrongValue, *(partial(field_value, field, text) for field in fields))


VALUES = [
    *["ada@example.com", "12.50", "-7", "1e5", "true", "2030-01-01", "2030-01-01T00:00:00.123456+02:00", "RECEIPT"],
    *["6f1d7c6e-9d3f-4d52-8f0e-3a0e4bd2f4a1", '{"a": [1, 2.5, "x\\u00e9", null], "b": {"c": 1e5}}', "[]", '"text"'],
]


def show_json(text: str) -> None:
    """Show stored JSON, such as that of an attempt in the history."""
    visible_json(indented(text))


def read_zone(text: str) -> object:
    return zone_of(text)


def read_host(text: str) -> None:
    check_host(text, ["https://jobs.example.com"])


# -- schedules and the command line ------------------------------------------------------------------------------------


def read_cron(text: str) -> None:
    recurrence = Recurrence(text, None, "Europe/Berlin", datetime(2030, 1, 1, tzinfo=UTC))
    recurrence.check()
    recurrence.in_words()


CRONS = ["0 3 * * *", "*/5 8-18 * * MON-FRI", "15 0 0 1,15 * *", "@daily", "0 0 L * *", "0 0 * * 5#2", "30 2 29 2 *"]


def read_timezone(text: str) -> None:
    Recurrence(None, timedelta(hours=1), text, datetime(2030, 1, 1, tzinfo=UTC)).check()


def read_schedule_values(text: str) -> None:
    """Read the attribute values of a schedule, which plain SQL may have written."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        spec = spec_of(make_queues()[0])
        from_json(spec, spec.mapper, values)


def read_key(text: str) -> None:
    specs = map(spec_of, make_queues())
    _read_by_one(SqlaqueueError, *(partial(key_parts, spec, text) for spec in specs))


def read_duration(text: str) -> object:
    return DURATION.convert(text, None, None)


def read_size(text: str) -> object:
    return SIZE.convert(text, None, None)


TARGETS: dict[str, Target] = {
    "notification": Target(receive_notification, NOTIFICATIONS),
    "cursor": Target(read_cursor, CURSORS, (ParameterError,)),
    "content of a cursor": Target(read_content_of_cursor, [_content(each) for each in CURSORS], (ParameterError,)),
    "search": Target(read_search, SEARCHES, (ParameterError,)),
    "query": Target(read_query, QUERIES, (ParameterError,)),
    "fields of a form": Target(read_fields, VALUES, (WrongValue,), weight=3),
    "stored JSON": Target(show_json, [VALUES[9], '{"error": "a\\u202eb", "n": 12345678901234567890}', "[1, [2, []]]"]),
    "time zone of a page": Target(read_zone, ["Europe/Berlin", "UTC", "America/Argentina/Ushuaia", "Etc/GMT+5"]),
    "host": Target(read_host, ["localhost:8000", "jobs.example.com", "[::1]:80", "127.0.0.1"], (PageError,)),
    "cron": Target(read_cron, CRONS, (SqlaqueueError,)),
    # It is looked for in files.
    "time zone": Target(read_timezone, ["Europe/Berlin", "UTC", "Etc/GMT+5"], (SqlaqueueError,), weight=1),
    "values of a schedule": Target(
        read_schedule_values,
        ['{"recipient": "a", "total": "1.5", "day": "2030-01-01", "kind": "RECEIPT", "at": null, "priority": 5}'],
        (SqlaqueueError,),
    ),
    "key": Target(read_key, ["1", "6f1d7c6e-9d3f-4d52-8f0e-3a0e4bd2f4a1", '"a,b",1'], (SqlaqueueError,)),
    "duration": Target(read_duration, ["90", "1.5h", "7d12h", "500ms"], (click.UsageError,)),
    "size": Target(read_size, ["512M", "1.5G", "2 GiB"], (click.UsageError,)),
    "address": Target(parse_address, ["8000", "0.0.0.0:9188", "[::1]:80"], (click.ClickException,)),
    "URL": Target(
        parse_url,
        ["postgresql+psycopg://ada:secret@host:5432/jobs?sslmode=require", "mariadb+pymysql://a:b@host/db"],
        (click.ClickException, sa.exc.ArgumentError),
    ),
}
