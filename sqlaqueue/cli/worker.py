"""The commands that run until they are stopped: ``worker``, ``scheduler`` and ``web``."""

from __future__ import annotations

import asyncio
import getpass
import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click
import sqlalchemy as sa
from click.core import ParameterSource

from sqlaqueue.cli.database import (
    Target,
    TargetArgument,
    TargetDatabase,
    engine_for,
    load,
    load_targets,
    parse_url,
    session_factory_of,
    targets_argument,
)
from sqlaqueue.cli.http import parse_address
from sqlaqueue.cli.output import (
    DURATION,
    SIZE,
    FailedError,
    InputError,
    NotStoppedError,
    clean_interrupt,
    command_errors,
    end_process,
    first_line,
    log_format_option,
    log_level_option,
    url_option,
)
from sqlaqueue.cli.processes import WorkerOptions, WorkerProcess, configure_logging, resident_bytes
from sqlaqueue.cli.schedules import schedules_of_module
from sqlaqueue.cli.supervisor import supervise
from sqlaqueue.scheduler import Scheduler, SchedulerBase

_CONSUMER_OPTIONS = ("concurrency", "batch_size", "lease", "timeout", "grace", "poll_interval", "worker_name", "batch")


@click.command(short_help="Run the jobs of queues.")
@click.argument("targets", cls=TargetArgument, metavar="TARGET[=HANDLER]...", nargs=-1, required=True)
@click.option(
    "--handler",
    metavar="MODULE:FUNCTION",
    multiple=True,
    help="The handler of a queue class whose target names none; one for each such class, in the same order.",
)
@url_option
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Number of handlers that run at the same time; 1 by default."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Maximum number of jobs per claim; by default as many as run within a second, up to 500.",
)
@click.option("--batch", is_flag=True, default=None, help="Call the handler with a list of jobs.")
@click.option("--lease", type=DURATION, help="Time after which a job is rescued unless its worker extends the lease.")
@click.option("--timeout", type=DURATION, help="Time after which a handler has failed.")
@click.option("--grace", type=DURATION, help="Time that handlers have to finish after SIGTERM; 30s by default.")
@click.option("--poll-interval", type=DURATION, help="Time between two polls of an empty queue; 1s by default.")
@click.option("--worker-name", help="Added to the worker's name in claimed_by and in the log.")
@click.option("--drain", is_flag=True, help="Exit when no job is due.")
@click.option(
    "--http",
    metavar="[HOST:]PORT",
    help="Answer /live, /ready and /metrics; on the loopback interface unless a host is given.",
)
@click.option("--otel", is_flag=True, help="Make spans and metrics by OpenTelemetry, as the process is set up for it.")
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    help="Number of worker processes to start; those that die are restarted.",
)
@click.option(
    "--isolate", is_flag=True, help="Run one handler at a time in each process, which is killed if that hangs."
)
@click.option(
    "--max-memory",
    type=SIZE,
    metavar="SIZE",
    help="With --isolate: kill a process whose handler makes it larger, such as 512M.",
)
@click.option(
    "--max-jobs", type=click.IntRange(min=1), help="With --isolate: replace a process after this number of jobs."
)
@click.option("--reload", is_flag=True, help="Restart when a Python file of the application changes; to develop with.")
@log_level_option
@log_format_option
@click.option("-v", "--verbose", is_flag=True, help="The same as --log-level debug: log every job.")
@click.pass_context
def worker(context: click.Context, /, *, processes: int | None, reload: bool, verbose: bool, **given: Any) -> None:
    """Run the jobs of one or more queues in one process, until SIGTERM or SIGINT.

    A queue class needs a handler: app:Email=app:send, or --handler app:send. A handler is a function
    handler(session, job) or a coroutine function. A Consumer or AsyncConsumer of your application, a list of them,
    or a function that returns either, has its own handler and database. A module, such as app.queues, stands for its
    list or function of Consumers, or for all Consumers in it.

    After the first signal running handlers may finish within the grace period, and other claimed jobs are released. A
    second signal ends the process immediately. Neither loses a job.
    """
    options = {name: given[name] for name in _CONSUMER_OPTIONS if given[name] is not None}
    of_classes = ("handler", "url", *_CONSUMER_OPTIONS)
    worker_options = WorkerOptions(
        targets=list(given["targets"]),
        handlers=list(given["handler"]),
        url=given["url"],
        consumer_options={
            name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in options.items()
        },
        from_command_line=[
            name for name in of_classes if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ],
        drain=given["drain"],
        http=given["http"],
        otel=given["otel"],
        measured=given["http"] is not None,
        log_level="debug" if verbose else given["log_level"],
        log_format=given["log_format"],
        isolate=given["isolate"],
        max_memory=given["max_memory"],
        max_jobs=given["max_jobs"],
    )
    _check_isolation(worker_options)
    if given["http"] is not None:
        parse_address(given["http"])
    if reload and given["drain"]:
        raise InputError("--reload: a worker with --drain ends by itself; give one of the two")
    if processes is None and not reload and not worker_options.isolate:
        try:
            WorkerProcess(worker_options, lambda: None).run()
        except NotStoppedError as error:
            end_process(error)
        return
    if os.name != "posix":
        option = "--isolate" if worker_options.isolate else "--reload" if processes is None else "--processes"
        raise InputError(f"{option} needs a system with POSIX signals; start workers without it")
    configure_logging(worker_options.log_level, worker_options.log_format)
    context.exit(supervise(worker_options, processes or 1, reload=reload))


def _check_isolation(options: WorkerOptions) -> None:
    for option, value in (("--max-memory", options.max_memory), ("--max-jobs", options.max_jobs)):
        if value is not None and not options.isolate:
            raise InputError(f"{option}: it limits the processes of --isolate; add --isolate, or leave it out")
    if options.max_memory is not None and not resident_bytes(os.getpid()):
        raise InputError("--max-memory: this system has no /proc, which shows the memory of a process; leave it out")


@click.command(short_help="Fire schedules.")
@targets_argument
@url_option
@click.option("--reset", is_flag=True, help="Replace what was changed at run time by the program's definitions.")
@log_level_option
@log_format_option
@click.pass_context
def scheduler(
    context: click.Context,
    targets: Sequence[str],
    url: str | None,
    *,
    reset: bool,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Fire schedules until SIGTERM or SIGINT. Any number of these processes may run at once.

    A TARGET is a Schedule of your application, a list of them, or a queue class for the schedules that were added at
    run time; these need --url. Or it is one Scheduler or AsyncScheduler, which has its own database. A module stands
    for its Scheduler, or for its Schedules.
    """
    found = [each for text in targets for each in ([load(text)] if ":" in text else schedules_of_module(text))]
    schedulers = [each for each in found if isinstance(each, SchedulerBase)]
    engine: Any = None
    if schedulers:
        # The environment may have a URL for the other commands.
        if len(found) > 1 or context.get_parameter_source("url") is ParameterSource.COMMANDLINE:
            raise InputError(f"{targets[0]}: your Scheduler has its schedules and its database; give nothing else")
        made = schedulers[0]
        made.reset = made.reset or reset
    else:
        if url is None:
            raise InputError(
                f"{targets[0]}: the database is missing; give --url "
                "postgresql+psycopg://user:password@host/database, or set SQLAQUEUE_URL"
            )
        engine = engine_for(parse_url(url))
        listed = [one for each in found for one in (each if isinstance(each, list | tuple) else [each])]
        with command_errors():
            made = _scheduler(engine, listed, reset=reset)
    configure_logging(log_level, log_format)
    spec = made.groups[0].spec
    with command_errors(spec):
        with TargetDatabase(made.session_factory) as database:
            database.connect(spec.model)
        try:
            if isinstance(made, Scheduler):
                made.run()
            else:
                asyncio.run(_run(made, engine))
        finally:
            if isinstance(engine, sa.Engine):
                engine.dispose()


def _scheduler(engine: Any, schedules: Sequence[Any], *, reset: bool) -> SchedulerBase:
    kind: Any = Scheduler
    if not isinstance(engine, sa.Engine):
        from sqlaqueue.async_scheduler import AsyncScheduler as kind  # noqa: PLC0415, N813 - it needs greenlet; one of two
    made: SchedulerBase = kind(session_factory_of(engine), schedules, reset=reset)
    return made


async def _run(scheduler: Any, engine: Any) -> None:
    await scheduler.run()
    if engine is not None:
        # Its connections cannot be closed after their event loop.
        await engine.dispose()


# -- web ---------------------------------------------------------------------------------------------------------------
# The command ``web``: the dashboard, without an application to mount it in.


_GRACE = 2
"""Seconds for the requests that are being answered when the command is stopped."""


@click.command(short_help="Show queues in the browser, and change their jobs.")
@targets_argument
@url_option
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="The port to listen on.")
@click.option("--read-only", is_flag=True, help="Show everything, and change nothing.")
@click.option("--redact", metavar="COLUMN", multiple=True, help="Do not show this column; may be repeated.")
@click.option(
    "--access",
    metavar="MODULE:FUNCTION",
    help="Let this access rule of your application decide, instead of a link that can be used once.",
)
@click.option(
    "--origin", metavar="URL", multiple=True, help="An address under which browsers reach it; may be repeated."
)
@log_level_option
def web(
    targets: Sequence[str],
    url: str | None,
    *,
    host: str,
    port: int,
    read_only: bool,
    redact: Sequence[str],
    access: str | None,
    origin: Sequence[str],
    log_level: str | None,
) -> None:
    """Show queues in the browser, and change their jobs, until SIGINT or SIGTERM.

    It serves this machine only, and prints a link that signs in one browser, once.

    For other machines, mount sqlaqueue.web.Dashboard in your application, which knows its users.
    """
    dashboard_module = _import()
    rule: Any = None if access is None else load(access)
    if access is not None and not callable(rule):
        raise InputError(
            f"--access {access}: it is {rule!r}; name a function that takes a request and returns an Access"
        )
    if access is not None and read_only:
        raise InputError("--read-only: what may be changed is decided by the rule of --access; give one of the two")
    if rule is None and not _is_loopback(host):
        raise InputError(
            f"--host {host}: without an access rule, only this machine has access. Mount sqlaqueue.web.Dashboard in "
            "your application, which knows its users, or give --access app.module:function"
        )
    loaded = load_targets(targets)
    configure_logging(log_level)
    if url is None:
        _check_one_database(loaded)
    with command_errors():
        for target in loaded[: None if url is None else 1]:
            with TargetDatabase.of(target, url) as database:
                database.connect(target.model)
    user = loaded[0].consumer or loaded[0].scheduler
    engine = None if url is None and user is not None else engine_for(parse_url(url or ""))
    factory = session_factory_of(engine) if user is None or engine is not None else user.session_factory
    with command_errors():
        app = dashboard_module.Dashboard(
            [target.model for target in loaded],
            factory,
            # Behind the token is the one who has started the command.
            access=rule or (lambda _: dashboard_module.Access(read=True, act=not read_only, user=_user())),
            redact=redact,
            origins=origin,
        )
    _serve(app, host, port, engine, has_token=rule is None)


def _import() -> Any:
    try:
        import uvicorn  # noqa: F401, PLC0415 - it needs an extra, which the other commands do not

        from sqlaqueue import web as dashboard_module  # noqa: PLC0415 - most commands do without it

        dashboard_module.Dashboard  # noqa: B018 - it needs an extra, and says which
    except ModuleNotFoundError as error:
        missing = "sqlaqueue.web needs uvicorn: pip install 'sqlaqueue[web]'" if error.name == "uvicorn" else str(error)
        raise InputError(missing) from None
    return dashboard_module


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_one_database(targets: Sequence[Target]) -> None:
    users = [target.consumer or target.scheduler for target in targets]
    if len({id(user.session_factory) for user in users if user is not None}) > 1:
        raise InputError(
            f"{', '.join(dict.fromkeys(target.text for target in targets))}: they have several session factories, and "
            "a dashboard has one; give --url, or set SQLAQUEUE_URL"
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # there is no such account, as in some containers
        return "sqlaqueue web"


def _serve(app: Any, host: str, port: int, engine: Any, *, has_token: bool) -> None:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        bound = socket.create_server((address, port), family=family)
    except OSError as error:
        raise FailedError(f"--host {host} --port {port}: {first_line(error)}") from error
    port = bound.getsockname()[1]
    origin = f"http://[{address}]:{port}" if family == socket.AF_INET6 else f"http://{address}:{port}"
    if has_token:
        from sqlaqueue.web.security import OneTimeToken  # noqa: PLC0415 - it needs an extra

        app = OneTimeToken(app, origin=origin, announce=_announce)
        _announce(app.new_link())
    else:
        click.echo(f"The dashboard is at {origin}/")
    with bound, clean_interrupt():
        asyncio.run(_serve_dashboard(app, bound, engine))


def _announce(link: str) -> None:
    # At once, also into a pipe: nothing else tells the user where to go.
    click.echo(f"Open {link}\nThe link works once, within ten minutes. Ctrl-C ends the dashboard.")


MOST_CONNECTIONS = 200
"""How many connections `sqlaqueue web` has open: twice as many as windows that it keeps up to date."""


def _limited_protocol() -> Any:
    """Return uvicorn's protocol, which ends the connection that has been idle for longest if there are too many.

    uvicorn waits for a request as long as its client likes, so that a program of this machine could otherwise open
    connections until there is none left for a browser.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol  # noqa: PLC0415 - it needs an extra

    protocol: Any = AutoHTTPProtocol
    opened: dict[Any, None] = {}

    def connection_made(self: Any, transport: Any) -> None:
        protocol.connection_made(self, transport)
        opened[self] = None
        if len(opened) > MOST_CONNECTIONS:
            # One that is answering has a cycle; if all are, it is the new one that ends.
            idle = (each for each in opened if each.cycle is None or each.cycle.response_complete)
            ended = next(idle, self)
            del opened[ended]
            ended.transport.abort()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        opened.pop(self, None)
        protocol.connection_lost(self, exc)

    return type("Limited", (protocol,), {"connection_made": connection_made, "connection_lost": connection_lost})


async def _serve_dashboard(app: Any, bound: socket.socket, engine: Any) -> None:
    import uvicorn  # noqa: PLC0415 - it needs an extra

    config = uvicorn.Config(
        app,
        http=_limited_protocol(),
        log_config=None,
        log_level="warning",
        # The log would contain the token, and keys of jobs.
        access_log=False,
        ws="none",
        server_header=False,
        # Headers of a proxy can be sent by any local program.
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
    try:
        await uvicorn.Server(config).serve(sockets=[bound])
    except KeyboardInterrupt:
        pass  # it raises the signal again when it has stopped
    finally:
        if engine is not None:
            disposing: Any = engine.dispose()
            if disposing is not None:
                await disposing
