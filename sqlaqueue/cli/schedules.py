"""The commands for stored schedules: ``schedules list``, ``show``, ``add``, ``edit``, ``pause`` and so on."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Sequence
from typing import Any

import click
import sqlalchemy as sa

from sqlaqueue.admin import schedules as stored
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.cli.database import (
    Target,
    TargetDatabase,
    load,
    load_module,
    load_targets,
    run_for,
    target_argument,
    targets_argument,
)
from sqlaqueue.cli.output import (
    DURATION,
    DurationType,
    InputError,
    add_row,
    command_errors,
    console,
    echo,
    echo_json,
    json_option,
    table,
    url_option,
    with_options,
)
from sqlaqueue.scheduler import SchedulerBase
from sqlaqueue.schedules.schedule import Schedule, from_json, schedule_groups
from sqlaqueue.texts import duration_text, moment_text


def load_schedule_targets(texts: Sequence[str]) -> list[Target]:
    found: dict[tuple[int, str | None], Target] = {}
    for target in (target for text in texts for target in _targets(text)):
        table = target.spec.table
        found.setdefault((id(table.metadata), table.schema), target)
    return list(found.values())


def _targets(text: str) -> list[Target]:
    found = load(text) if ":" in text else schedules_of_module(text)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if isinstance(found, SchedulerBase):
        return [Target(text, group.spec.model, scheduler=found) for group in found.groups]
    listed: list[Any] = list(found) if isinstance(found, list | tuple) else [found]
    if any(isinstance(each, Schedule) for each in listed):
        with command_errors():
            return [Target(text, group.spec.model) for group in schedule_groups(listed, text)]
    return load_targets([text])


def schedules_of_module(name: str) -> list[Any]:
    """Return the Scheduler of a module, or its Schedules, or else its queue classes."""
    found = vars(load_module(name))
    schedulers = {id(each): (attribute, each) for attribute, each in found.items() if isinstance(each, SchedulerBase)}
    if len(schedulers) > 1:
        names = ", ".join(f"{name}:{attribute}" for attribute, _ in schedulers.values())
        raise InputError(f"{name}: the module has several Schedulers; name one of them: {names}")
    if schedulers:
        return [each for _, each in schedulers.values()]
    listed = [one for each in found.values() for one in (each if isinstance(each, list | tuple) else [each])]
    schedules = {id(each): each for each in listed if isinstance(each, Schedule)}
    return [*schedules.values()] or [target.model for target in load_targets([name])]


class _Grace(DurationType):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "default" else super().convert(value, param, ctx)


_NAME = click.argument("name")
_NAMES = click.argument("names", metavar="NAME...", nargs=-1, required=True)
_definition_options = with_options(
    click.option("--cron", help="The cron expression, such as '0 3 * * *', or @daily."),
    click.option("--every", type=DURATION, help="The time between two ticks, such as 5m, instead of --cron."),
    click.option("--timezone", help="The time zone of the cron expression; UTC by default."),
    click.option(
        "--value",
        "given_values",
        metavar="ATTRIBUTE=VALUE",
        multiple=True,
        help="The value of an attribute of each job, as JSON or as text; may be repeated. Replaces all values.",
    ),
    click.option("--jitter", type=DURATION, help="The longest time by which a job is due later than its tick."),
    click.option("--catch-up", help="How many missed ticks are fired: skip, latest, all, or a number."),
    click.option(
        "--misfire-grace",
        type=_Grace(),
        metavar="DURATION|default",
        help="The time after which a tick counts as missed; by default 60s, or until the next tick if that is sooner.",
    ),
    click.option(
        "--skip-unfinished/--no-skip-unfinished", default=None, help="Do not fire while the last job is unfinished."
    ),
)


@click.group(short_help="Show and change schedules.")
def schedules() -> None:
    """Show and change the schedules that are stored in the database; running processes follow within seconds.

    TARGET is a queue class, a Consumer, a Scheduler or a Schedule of your application, or a module with one of these:
    its tables have the schedules.
    """


@schedules.command("list", short_help="List schedules.")
@targets_argument
@url_option
@json_option
def list_(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """List schedules, with when they tick, their next tick, and what keeps them from it."""
    found: list[ScheduleInfo] = []
    for each in load_schedule_targets(targets):
        found += _run(each, url, stored.schedules)
    if json:
        echo_json(found)
        return
    if not found:
        echo("no schedules; `sqlaqueue schedules add` adds one")
        return
    shown = table("queue", "name", "when", "next tick", "last tick", "defined by", "state")
    for info in found:
        last = "-" if info.last_tick is None else moment_text(info.last_tick)
        upcoming = "-" if info.next_tick is None else moment_text(info.next_tick)
        add_row(shown, info.queue, info.name, info.words, upcoming, last, _origin(info), _state(info))
    console().print(shown)


@schedules.command(short_help="Show one schedule with its next ticks.")
@target_argument
@_NAME
@click.option("-n", "--ticks", type=click.IntRange(1, 1000), default=5, show_default=True, help="Number of ticks.")
@url_option
@json_option
def show(target: str, name: str, url: str | None, *, ticks: int, json: bool) -> None:
    """Explain a schedule in words, and show its definition and its next ticks."""
    info = _run(_one(target), url, stored.schedule, name)
    upcoming = info.next_ticks(ticks)
    if json:
        echo_json({**vars(info), "next_ticks": upcoming})
        return
    echo(f"{info.name}: {info.words}")
    echo(f"  enqueues {info.model or 'jobs'} in the queue {info.queue}")
    for text in _details(info):
        echo(f"  {text}")
    for number, tick in enumerate(upcoming):
        echo(f"  {'next ticks:' if number == 0 else '':11} {moment_text(tick)}")


@schedules.command(short_help="Add a schedule.")
@target_argument
@_NAME
@_definition_options
@url_option
def add(target: str, name: str, url: str | None, **options: Any) -> None:
    """Add a schedule of the jobs of a queue class. Running processes that have imported the class fire it."""
    one = _one(target)
    with command_errors(one.spec):
        schedule: Schedule[Any] = Schedule(name, one.model, **_definition(one, options))
    _run(one, url, stored.add_schedule, schedule)
    echo(f"added {name}")


@schedules.command(short_help="Change a schedule.")
@target_argument
@_NAME
@_definition_options
@url_option
def edit(target: str, name: str, url: str | None, **options: Any) -> None:
    """Change a schedule. The definition in your program has no effect from then on, until `schedules reset`."""
    one = _one(target)
    changes = _definition(one, options)
    if not changes:
        raise InputError("give at least one option to change, such as --cron")
    _run(one, url, stored.edit_schedule, name, **changes)
    echo(f"changed {name}")


def _change(operation: Callable[..., None], done: str, short_help: str, description: str) -> click.Command:
    @click.command(operation.__name__.removesuffix("_schedule"), short_help=short_help, help=description)
    @target_argument
    @_NAMES
    @url_option
    def command(target: str, names: Sequence[str], url: str | None) -> None:
        one = _one(target)
        for name in names:
            _run(one, url, operation, name)
            echo(f"{name} {done}")

    return command


for changing in (
    _change(
        stored.pause_schedule,
        "is paused",
        "Pause schedules.",
        "Pause schedules. The ticks until they are resumed are skipped.",
    ),
    _change(
        stored.resume_schedule,
        "is resumed",
        "Resume paused schedules.",
        "Resume paused schedules with their next tick.",
    ),
    _change(
        stored.run_schedule,
        "will be fired by a running process",
        "Fire schedules now.",
        "Let a running process fire schedules now, in addition to their ticks, and even if they are paused.",
    ),
    _change(
        stored.reset_schedule,
        "is as the program declares it",
        "Undo changes made at run time.",
        "Replace what was changed at run time by the definition of the program.",
    ),
    _change(
        stored.remove_schedule,
        "is removed",
        "Remove schedules.",
        "Remove schedules. A program that still declares one stores it again when it starts.",
    ),
):
    schedules.add_command(changing)


def _one(target: str) -> Target:
    found = load_schedule_targets([target])
    if len(found) > 1:
        names = ", ".join(each.model.__name__ for each in found)
        raise InputError(f"{target}: its schedules are in several tables; name one of the queue classes: {names}")
    return found[0]


def _run(target: Target, url: str | None, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with TargetDatabase.of(target, url) as database:
        return run_for(target, database, operation, *arguments, **options)


def _definition(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    values = options.pop("given_values")
    given = {name: value for name, value in options.items() if value is not None}
    if values:
        pairs = [text.partition("=") for text in values]
        wrong = next((text for text, (_, equals, _) in zip(values, pairs, strict=True) if not equals), None)
        if wrong is not None:
            raise InputError(f"--value {wrong}: write ATTRIBUTE=VALUE")
        mapper = sa.inspect(target.model)
        parsed = {name: _parsed(mapper.columns.get(name), text) for name, _, text in pairs}
        with command_errors(target.spec):
            given["values"] = from_json(target.spec, mapper, parsed)
    if given.get("misfire_grace") == "default":
        given["misfire_grace"] = None
    number = given.get("catch_up")
    if number is not None and number.isdecimal():
        given["catch_up"] = int(number)
    return given


def _parsed(column: Any, text: str) -> Any:
    """Return the JSON in a text; the text itself for a column of texts, and for what is no JSON."""
    try:
        return text if column is None or column.type.python_type is str else json_text.loads(text)
    except (NotImplementedError, ValueError):
        return text


def _origin(info: ScheduleInfo) -> str:
    return {"program": "the program", "edited": "the program, edited", "added": "added at run time"}[info.origin]


def _state(info: ScheduleInfo) -> str:
    if info.last_error is not None:
        return f"fails: {info.last_error}"
    if info.paused_at is not None:
        return "paused"
    if info.late is not None:
        return f"overdue by {duration_text(info.late.total_seconds())}"
    return "waiting for its first look" if info.next_tick is None else "waiting"


def _details(info: ScheduleInfo) -> list[str]:
    made = [f"made by {info.factory}"] if info.factory is not None else []
    values = [f"values: {json_text.dumps(dict(info.values))}"] if info.values else []
    jitter = [f"jitter: up to {duration_text(info.jitter.total_seconds())}"] if info.jitter else []
    skip = ["not while the last job is unfinished"] if info.skip_unfinished else []
    own = info.misfire_grace
    after = "1m, or at the next tick" if own is None else duration_text(own.total_seconds())
    missed = f"missed after {after}, catches up {info.catch_up}"
    last = [] if info.last_tick is None else [f"last tick: {moment_text(info.last_tick)}"]
    return [*made, *values, *jitter, missed, *skip, f"defined by: {_origin(info)}", f"state: {_state(info)}", *last]
