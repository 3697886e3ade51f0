"""The commands that show the state of queues: ``stats``, ``failed``, ``workers``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from sqlalchemy.orm import Session

from sqlaqueue.admin import changes, state
from sqlaqueue.admin import jobs as admin_jobs
from sqlaqueue.admin.changes import reads_by_priority
from sqlaqueue.admin.explain_job import MISSING, explain_job
from sqlaqueue.admin.jobs import Attempt, FailureGroup, JobInfo
from sqlaqueue.admin.state import FailingConsumer, Stats
from sqlaqueue.cli.database import (
    Target,
    TargetArgument,
    TargetDatabase,
    load_targets,
    open_targets,
    run_for,
    target_argument,
    targets_argument,
)
from sqlaqueue.cli.output import (
    DURATION,
    FAILED,
    DatabaseError,
    FailedError,
    InputError,
    add_row,
    ago,
    clean_interrupt,
    command_errors,
    console,
    echo,
    echo_json,
    filter_options,
    first_line,
    job_filter,
    jobs_text,
    json_option,
    log_level_option,
    plain,
    table,
    url_option,
)
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.ddl import UPDATE_COMMAND
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.run import key_text
from sqlaqueue.sessions import execute
from sqlaqueue.statements import verbs
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.texts import duration_text, moment_text

if TYPE_CHECKING:
    from rich.live import Live

    from sqlaqueue.prometheus.queues import GaugeReader, Reading, ScrapeCollector

_SHOWN_KEYS = 5
"""Number of running jobs whose keys the table of Consumers shows."""


@click.command(short_help="Show jobs by state, due jobs, and Consumers.")
@targets_argument
@url_option
@click.option(
    "--watch",
    type=DURATION,
    is_flag=False,
    flag_value=timedelta(seconds=2),
    help="Repeat at this interval, every two seconds by default; give it after the targets.",
)
@click.option("--active", is_flag=True, help="Do not count finished jobs, as that reads the whole table.")
@json_option
def stats(targets: Sequence[str], url: str | None, watch: timedelta | None, *, active: bool, json: bool) -> None:
    """Show for each queue the number of jobs by state, how many are due and since when, and the number of Consumers."""
    loaded = load_targets(targets)
    with contextlib.ExitStack() as stack:
        databases = [(target, stack.enter_context(TargetDatabase.of(target, url))) for target in loaded]

        def query() -> list[Stats]:
            return [run_for(target, database, state.stats, finished=not active) for target, database in databases]

        if watch is None:
            rows = query()
            if json:
                echo_json(rows)
            else:
                # The other commands of this module do without the checks of the doctor.
                from sqlaqueue.cli.doctor import worst_finding, worst_finding_text, worst_of  # noqa: PLC0415 - see above

                worst = worst_of(
                    (database.run(worst_finding, target.model), target.model) for target, database in databases
                )
                console().print(_stats_table(rows, None if worst is None else worst_finding_text(*worst)))
            return
        # Ctrl-C ends it.
        with contextlib.suppress(KeyboardInterrupt):
            _watch(query, watch.total_seconds(), json=json)


def _watch(query: Callable[[], list[Stats]], seconds: float, *, json: bool) -> None:
    """Show what the query returns again and again. A database that stops answering is waited for, and said once."""
    screen, problem, rows = console(), "", query()
    is_drawn = screen.is_terminal and not json
    with _drawing(screen) if is_drawn else contextlib.nullcontext() as live:
        while True:
            if live is not None:
                note = plain(f"{problem}; trying again, the numbers are from before") if problem else ""
                live.update(Group(_stats_table(rows), note), refresh=True)
            elif json and not problem:
                echo_json(rows, one_line=True)
            elif not problem:
                screen.print(_stats_table(rows))
            time.sleep(seconds)
            said = problem
            try:
                rows, problem = query(), ""
            except DatabaseError as error:
                problem = error.format_message()
            if live is None and bool(problem) != bool(said):
                click.echo(f"{problem}; trying again" if problem else "the database answers again", err=True)


def _drawing(screen: Console) -> Live:
    from rich.live import Live  # noqa: PLC0415 - most commands draw nothing again

    return Live(console=screen, auto_refresh=False)


def _stats_table(rows: Sequence[Stats], finding: str | None = None) -> RenderableType:
    states = list(dict.fromkeys(state for row in rows for state in row.states))
    if all(row.states.get("processing", 0) in {0, row.running} for row in rows):
        states = [state for state in states if state != "processing"]
    numbers = ["pending", "running", *states, "due", "consumers"]
    shown = table("queue", *states, "running", "due", "oldest due", "consumers", right=numbers)
    notes = []
    for row in rows:
        counts = [row.states.get(state, "-") for state in states]
        add_row(shown, row.queue, *counts, row.running, row.due, duration_text(row.oldest_due), row.consumers)
        if row.paused:
            notes.append(plain(f"{row.queue} is paused"))
        if row.at_limit:
            notes.append(plain(f"{row.queue}: at their limit: {', '.join(map(str, row.at_limit))}"))
        if row.expired_leases:
            leases, have = ("lease", "has") if row.expired_leases == 1 else ("leases", "have")
            notes.append(
                plain(
                    f"{row.queue}: {row.expired_leases} {leases} of running jobs {have} expired; Consumers rescue the "
                    "jobs, or `sqlaqueue rescue`"
                )
            )
        if row.missing_indexes:
            names = ", ".join(row.missing_indexes)
            fix = UPDATE_COMMAND
            what = "claims may read the whole table, or jobs are not unique"
            notes.append(plain(f"{row.queue}: {what}, missing or invalid indexes: {names}; {fix}"))
        if row.failed_by_attempts:
            parts = (
                f"{jobs} failed after {attempts} {'attempt' if attempts == 1 else 'attempts'}"
                for attempts, jobs in row.failed_by_attempts.items()
            )
            notes.append(plain(f"{row.queue}: {', '.join(parts)}"))
    if finding is not None:
        notes.append(plain(finding))
    return Group(shown, *notes)


@click.command(short_help="Show failed jobs by kind of error.")
@target_argument
@url_option
@click.option(
    "--examples", type=click.IntRange(0, 100), default=3, show_default=True, help="Number of keys shown for each kind."
)
@click.option("--traceback", is_flag=True, help="Show the error of the newest job of each kind, with its traceback.")
@json_option
def failed(target: str, url: str | None, examples: int, *, traceback: bool, json: bool) -> None:
    """Show failed jobs, grouped by kind of error: the name of its class, or the kind given to Fail(kind=...).

    An error whose text starts with neither is of the kind "other". With --json the errors have their tracebacks.
    """
    found: list[tuple[str, FailureGroup]] = []
    without: list[str] = []
    for each, run in open_targets(load_targets([target]), url):
        groups = run(admin_jobs.failures, examples=examples)
        found += [(each.spec.name, group) for group in groups]
        if not groups:
            without.append(f"{each.spec.name}: no failed jobs")
    if json:
        echo_json([{"queue": queue, **vars(one), "keys": [key_text(key) for key in one.keys]} for queue, one in found])
        return
    if found:
        shown = table("queue", "kind", "jobs", "newest", "keys", "last error", right=["jobs"])
        for queue, group in found:
            text = (group.error or "").splitlines()[:1]
            keys = " ".join(map(key_text, group.keys))
            add_row(shown, queue, group.kind or "(no error)", group.count, ago(group.newest), keys, *text)
        console().print(shown)
    echo(*without)
    for queue, group in found if traceback else ():
        if group.error:
            echo("", f"{queue}:", *group.error.split("\n"))


@click.command(short_help="Show the Consumers of queues.")
@targets_argument
@url_option
@click.option("--here", is_flag=True, help="Only those of this machine.")
@click.option("--quiet", metavar="NAME", help="Ask the Consumers of this name to claim no more jobs, and stay alive.")
@click.option("--resume", metavar="NAME", help="Ask the Consumers of this name to claim jobs again.")
@click.option("--stop", metavar="NAME", help="Ask the Consumers of this name to stop, as after SIGTERM.")
@json_option
def workers(
    targets: Sequence[str],
    url: str | None,
    *,
    here: bool,
    quiet: str | None,
    resume: str | None,
    stop: str | None,
    json: bool,
) -> None:
    """Show the Consumers, on all machines, that have sent a heartbeat recently.

    The exit code is 1 if one of the queues has none.

    A NAME is that of the list, or HOST:PID. If several Consumers have it, all of them are asked. They obey at once if
    they are notified, otherwise within some ten seconds.
    """
    given: Sequence[tuple[changes.ConsumerAction, str | None]] = (("quiet", quiet), ("resume", resume), ("stop", stop))
    asked: list[tuple[changes.ConsumerAction, str]] = [(action, name) for action, name in given if name is not None]
    if asked:
        if len(asked) > 1:
            raise InputError(f"--{asked[0][0]} and --{asked[1][0]}: give one of them at a time")
        _ask_consumers(targets, url, *asked[0], here=here, json=json)
        return
    rows: list[dict[str, Any]] = []
    all_served = True
    for target, run in open_targets(load_targets(targets), url):
        found = run(_consumers, here=here)
        rows.extend({"queue": target.spec.name, **row} for row in found)
        all_served = all_served and bool(found)
    if json:
        echo_json(rows)
    elif not rows:
        echo("no Consumers" + (" on this machine" if here else ""))
    else:
        console().print(_consumers_table(rows))
    if not all_served:
        click.get_current_context().exit(FAILED)


def _ask_consumers(
    targets: Sequence[str], url: str | None, action: changes.ConsumerAction, name: str, *, here: bool, json: bool
) -> None:
    """Ask the live Consumers of a name; those that are not alive are past being asked."""
    rows: list[dict[str, Any]] = []
    others: list[str] = []
    for _, run in open_targets(load_targets(targets), url):
        alive = [each for each in run(_live_workers) if not here or each.host == this_host()]
        chosen = [each for each in alive if name in {each.name, f"{each.host}:{each.pid}"}]
        others += [str(each.name) for each in alive]
        if chosen:
            run(_ask, action, [each.id for each in chosen])
        rows += [{"queue": each.queue, "name": each.name, "host": each.host, "pid": each.pid} for each in chosen]
    if not rows:
        known = f"there are {', '.join(dict.fromkeys(others))}" if others else "no Consumer is alive"
        raise InputError(f"--{action} {name}: no live Consumer of these queues has this name; {known}")
    if json:
        echo_json([{**row, "asked": action} for row in rows])
        return
    for row in rows:
        echo(f"{row['queue']}: {row['name']} was asked {ASKED[action]}")


ASKED: dict[changes.ConsumerAction, str] = {
    "quiet": "to claim no more jobs",
    "resume": "to claim jobs again",
    "stop": "to stop",
}


def _live_workers(session: Session, model: type[Any]) -> list[Any]:
    return [each for each in state.workers(session, spec_of(model)) if each.is_alive]


def _ask(session: Session, model: type[Any], action: changes.ConsumerAction, ids: Sequence[str]) -> None:
    changes.ask_consumers(session, model, action, ids)


def _consumers_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    columns = ("queue", "host", "pid", "name", "started", "heartbeat", "listening", "version", "claimed", "running")
    shown = table(*columns, right=["pid", "claimed"])
    for row in rows:
        running = " ".join(map(key_text, row["running"][:_SHOWN_KEYS]))
        if len(row["running"]) > _SHOWN_KEYS:
            running += f" ... ({len(row['running'])})"
        started, heartbeat = ago(row["created_at"]), ago(row["heartbeat_at"])
        listening = "quiet" if row["quiet"] else "yes" if row["listening"] else "no, polling"
        process = (row["queue"], row["host"], row["pid"], row["name"])
        add_row(shown, *process, started, heartbeat, listening, row["version"], row["claimed"], running)
    return shown


def _consumers(session: Session, model: type[Any], *, here: bool) -> list[dict[str, Any]]:
    found = session.execute(verbs.consumers(model), bind_arguments={"mapper": model})
    # The names of SQLAlchemy's own attributes begin with an underscore.
    return [
        {**row._mapping, **state.about_consumer(row)._asdict()}  # noqa: SLF001 - public names
        for row in found
        if not here or row.host == this_host()
    ]


def this_host() -> str:
    """Return the name of this machine, as its Consumers write it."""
    return worker_name().rpartition(":")[0]


@click.command(short_help="List jobs.")
@target_argument
@url_option
@filter_options(STATES)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of jobs.")
@json_option
def jobs(target: str, url: str | None, *, limit: int, json: bool, **options: Any) -> None:
    """List jobs, newest first, by the time when they finished or, if they have not, when they were enqueued."""
    selected = job_filter(options, "created_at")
    found: list[JobInfo] = []
    for _, run in open_targets(load_targets([target], of_a_key=selected.keys is not None), url):
        found += run(admin_jobs.jobs, selected, limit=limit)
    if json:
        echo_json([_json(info) for info in found])
        return
    if not found:
        echo("no such jobs")
        return
    columns = ("queue", "key", "state", "enqueued", "waited", "ran", "finished", "attempts", "last error")
    shown = table(*columns, right=["attempts"])
    for info in found:
        attempts = "-" if info.attempts is None else info.attempts
        first_line = (info.last_error or "").splitlines()[:1]
        waited, ran = _durations(info)
        add_row(
            shown,
            info.queue,
            key_text(info.key),
            info.state,
            ago(info.created_at),
            duration_text(waited),
            duration_text(ran),
            ago(info.finished_at),
            attempts,
            *first_line,
        )
    console().print(shown)


@click.command(short_help="Show one job.")
@target_argument
@click.argument("key")
@url_option
@click.option(
    "--set",
    "changed_columns",
    metavar="COLUMN=VALUE",
    multiple=True,
    help="Change a column of a job that is not running; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Show what --set would change, and change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before --set changes the job.")
@json_option
def job(
    target: str, key: str, url: str | None, changed_columns: Sequence[str], *, dry_run: bool, yes: bool, json: bool
) -> None:
    """Show one job with all columns of its row, and its attempts if the queue has an attempt history.

    With --set its columns are changed instead, for instance the address in a job that has failed, before it is
    requeued.

    Separate the parts of a composite KEY by commas. The exit code is 1 if there is no such job, nor attempts of it.
    """
    if changed_columns:
        from sqlaqueue.cli.change import set_columns  # noqa: PLC0415 - it imports much that shows nothing

        set_columns(target, key, changed_columns, url, dry_run=dry_run, yes=yes, json=json)
        return
    if dry_run or yes:
        raise InputError(f"{'--dry-run' if dry_run else '--yes'}: nothing is to be changed; give --set COLUMN=VALUE")
    _show_job(target, key, url, json=json)


def _show_job(target: str, key: str, url: str | None, *, json: bool) -> None:
    for each, run in open_targets(load_targets([target], of_a_key=True), url):
        found = run(admin_jobs.job, key)
        kept = each.spec.config.attempt_history is not None
        history = run(admin_jobs.attempts, key) if kept else []
        more = {"history": [{**vars(one), "seconds": one.seconds} for one in history]} if kept else {}
        if found is None:
            if not history:
                raise FailedError(f"{each.spec.name}: there is no job {key}")
            if json:
                echo_json({"queue": each.spec.name, "key": key, "row": None, **more})
                continue
            echo(f"{each.spec.name} {key} does not exist any more")
            _show_attempts(each.spec.name, history)
            continue
        info, values = found
        if json:
            echo_json({**_json(info), "row": values, **more})
            continue
        waited, ran = _durations(info)
        echo(f"{info.queue} {key_text(info.key)} is {info.state}")
        if ran is not None:
            echo(f"waited for {duration_text(waited)}, ran for {duration_text(ran)}")
        width = max(map(len, values), default=0)
        for name, value in values.items():
            first, *others = ("-" if value is None else str(value)).split("\n")
            echo(f"  {name:{width}}  {first}", *(f"  {'':{width}}  {line}" for line in others))
        if history:
            _show_attempts(info.queue, history)


def _show_attempts(queue: str, history: list[Attempt]) -> None:
    """Show ended attempts; their tracebacks are in the JSON."""
    shown = table("queue", "attempt", "outcome", "started", "ran", "worker", "error", right=["attempt"])
    for one in history:
        first_line = (one.error or "").splitlines()[:1]
        ran = duration_text(one.seconds)
        add_row(shown, queue, one.attempt, one.outcome, ago(one.started_at), ran, one.worker or "-", *first_line)
    console().print(shown)


def _durations(info: JobInfo) -> tuple[float | None, float | None]:
    due = max((moment for moment in (info.run_at, info.created_at) if moment is not None), default=None)
    started, finished = info.started_at, info.finished_at
    waited = None if started is None or due is None else (started - due).total_seconds()
    return waited, None if started is None or finished is None else (finished - started).total_seconds()


def _json(info: JobInfo) -> dict[str, Any]:
    return {**vars(info), "key": key_text(info.key)}


# -- metrics -----------------------------------------------------------------------------------------------------------


@click.command(short_help="Export gauges of queues to Prometheus.")
@click.argument("targets", cls=TargetArgument, metavar="[TARGET]...", nargs=-1)
@url_option
@click.option("--port", type=click.IntRange(0, 65535), default=9187, show_default=True, help="The port to listen on.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--once", is_flag=True, help="Print the metrics and exit; the exit code is 1 if some cannot be read.")
@click.option("--finished", is_flag=True, help="Count finished jobs too, which reads the whole table at every scrape.")
@click.option(
    "--count-limit",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="The number up to which unfinished jobs are counted.",
)
@click.option(
    "--statement-timeout", type=DURATION, default="2s", show_default=True, help="Cancel a statement after this time."
)
@click.option("--max-age", type=DURATION, default="10s", show_default=True, help="Repeat a result for this time.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana and exit.")
@click.option("--alerts", is_flag=True, help="Print alert rules for Prometheus and exit.")
@log_level_option
def metrics(
    targets: Sequence[str],
    url: str | None,
    *,
    port: int,
    host: str,
    log_level: str | None,
    count_limit: int,
    statement_timeout: timedelta,
    max_age: timedelta,
    once: bool,
    finished: bool,
    dashboard: bool,
    alerts: bool,
) -> None:
    """Serve the gauges of queues at /metrics until SIGTERM or SIGINT, for a Prometheus server to scrape.

    One exporter serves all queues, for all workers. The schedules are those in the tables of the queues.
    """
    prometheus = _import()
    if dashboard or alerts:
        click.echo(prometheus.dashboard() if dashboard else prometheus.alerts(), nl=False)
        return
    if not targets:
        raise InputError("name a queue, such as app.models:Email; --dashboard and --alerts need none")
    loaded = load_targets(targets)
    from sqlaqueue.cli.processes import configure_logging  # noqa: PLC0415 - it imports Consumers

    configure_logging(log_level)
    with contextlib.ExitStack() as stack:
        databases = _databases(loaded, url, stack)
        collector = _collector(
            loaded,
            databases,
            count_limit=count_limit,
            statement_timeout=statement_timeout,
            max_age=max_age,
            finished=finished,
        )
        if once:
            _print(collector)
            return
        for target, database in databases:
            with command_errors(target.spec):
                database.connect(target.model)
        _serve(collector, host, port)


def _import() -> Any:
    try:
        from sqlaqueue import prometheus  # noqa: PLC0415 - it needs an extra, which the other commands do not
    except ModuleNotFoundError as error:
        raise InputError(str(error)) from None
    return prometheus


def _databases(
    targets: Sequence[Target], url: str | None, stack: contextlib.ExitStack
) -> list[tuple[Target, TargetDatabase]]:
    if url is not None:
        shared = stack.enter_context(TargetDatabase.of(targets[0], url))
        return [(target, shared) for target in targets]
    return [(target, stack.enter_context(TargetDatabase.of(target, None))) for target in targets]


def _collector(
    targets: Sequence[Target], databases: Sequence[tuple[Target, TargetDatabase]], **options: Any
) -> ScrapeCollector:
    from sqlaqueue.prometheus.queues import Scrape, ScrapeCollector  # noqa: PLC0415 - it needs an extra

    with command_errors():
        scrape = Scrape([target.model for target in targets], "sqlaqueue metrics", **options)
    by_queue = {target.spec.name: database for target, database in reversed(databases)}

    def read(reader: GaugeReader) -> Reading:
        result: Reading = by_queue[reader.spec.name].run(execute, reader.read)
        return result

    return ScrapeCollector(scrape, read)


def _print(collector: ScrapeCollector) -> None:
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - it needs an extra

    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    click.echo(text, nl=False)
    if any(line.startswith("sqlaqueue_scrape_success{") and line.endswith(" 0.0") for line in text.splitlines()):
        click.get_current_context().exit(FAILED)


def _serve(collector: ScrapeCollector, host: str, port: int) -> None:
    from prometheus_client import (  # noqa: PLC0415 - it needs an extra
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        generate_latest,
    )

    from sqlaqueue.cli.http import serving_metrics  # noqa: PLC0415 - it imports servers and clients of HTTP

    registry = CollectorRegistry()
    registry.register(collector)
    with clean_interrupt(), contextlib.ExitStack() as stack:
        try:
            serving = serving_metrics(host, port, lambda: (CONTENT_TYPE_LATEST, generate_latest(registry)))
            address = stack.enter_context(serving)
        except OSError as error:
            raise FailedError(f"--host {host} --port {port}: {first_line(error)}") from error
        logger.info("metrics: serving %s", address, extra=fields("exporter_started", address=address))
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        stack.close()
        logger.info("metrics: stopped", extra=fields("exporter_stopped"))


@click.command(short_help="Say why a job, or a queue, does not run.")
@target_argument
@click.argument("key", required=False)
@url_option
@json_option
def why(target: str, key: str | None, url: str | None, *, json: bool) -> None:
    """Say why a job does not run: its duplicate, a pause, its time, a lock, no Consumer, and what to do about it.

    Separate the parts of a composite KEY by commas. Without KEY: what keeps the jobs of the queue from running. The
    exit code is 1 if there is no such job.
    """
    exists = True
    for _, run in open_targets(load_targets([target], of_a_key=key is not None), url):
        if key is None:
            _echo_queue(*run(_queue), json=json)
            continue
        explanation = run(explain_job, key)
        exists = exists and explanation.state != MISSING
        if json:
            shown = explanation.key
            echo_json({**asdict(explanation), "key": key_text(shown) if isinstance(shown, tuple) else str(shown)})
        else:
            echo(*str(explanation).split("\n"))
    if not exists:
        click.get_current_context().exit(FAILED)


def _queue(session: Session, model: type[Any]) -> tuple[Stats, datetime | None, Sequence[Any]]:
    spec = spec_of(model)
    moment = None
    if spec.has("run_at"):
        upcoming = spec.strategy.upcoming(spec, 1, by_priority=reads_by_priority(session, spec))
        moment = session.scalar(upcoming, bind_arguments={"mapper": spec.mapper})
    next_due = None if moment is None else datetime.fromtimestamp(float(moment), UTC)
    return state.stats(session, model), next_due, state.live_consumers(session, spec) or ()


def _echo_queue(stats: Stats, next_due: datetime | None, consumers: Sequence[Any], *, json: bool) -> None:
    failing, quiet = state.failing_consumers(consumers), state.names_if_all_quiet(consumers)
    if json:
        shown = ("queue", "paused", "consumers", "running", "due", "oldest_due")
        values = {name: getattr(stats, name) for name in shown}
        full = [asdict(each) for each in stats.at_limit]
        failed, fail = stats.states.get("failed", 0), [each._asdict() for each in failing]
        values |= {"claims_fail": fail, "all_quiet": quiet}
        echo_json({**values, "next_due": next_due, "at_limit": full, "failed": failed})
        return
    echo(stats.queue)
    for line in _lines(stats, next_due, failing, quiet):
        echo(f"  {line}")


def _lines(
    stats: Stats, next_due: datetime | None, failing: Sequence[FailingConsumer], quiet: Sequence[str]
) -> Iterator[str]:
    if stats.paused:
        yield "It is paused, so no job is claimed; `sqlaqueue resume` ends that."
    if stats.consumers:
        number = "1 live Consumer works for" if stats.consumers == 1 else f"{stats.consumers} live Consumers work for"
        yield f"{number} it; {jobs_text(stats.running)} running."
    else:
        yield "No live Consumer works for it; start one, for instance with `sqlaqueue worker`."
    if quiet:
        yield f"Each was asked to claim no more jobs ({', '.join(quiet)}); `sqlaqueue workers --resume` ends that."
    for each in failing:
        yield f"Every claim of {each.name} has failed since {moment_text(each.since)}: {each.error.removesuffix('.')}."
    since = "" if stats.oldest_due is None else f", the oldest of them for {duration_text(stats.oldest_due)}"
    then = "" if next_due is None else f"; the next one is due at {moment_text(next_due)}"
    yield f"Due: {jobs_text(stats.due)}{since}{then}."
    if stats.at_limit:
        yield f"At their limit: {', '.join(map(str, stats.at_limit))}; the end of a run makes room."
    failed = stats.states.get("failed", 0)
    if failed:
        yield f"Failed: {jobs_text(failed)}; `sqlaqueue failed` shows why."
