"""The command ``worker``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click
import sqlalchemy as sa
from click.core import ParameterSource

from sqlaqueue.cli.database import TargetDatabase, engine_for, load, parse_url, session_factory_of
from sqlaqueue.cli.http import parse_address
from sqlaqueue.cli.output import (
    DURATION,
    InputError,
    NotStoppedError,
    command_errors,
    end_process,
    log_level_option,
    targets_argument,
    url_option,
)
from sqlaqueue.cli.processes import WorkerOptions, WorkerProcess, configure_logging
from sqlaqueue.cli.supervisor import supervise
from sqlaqueue.scheduler import Scheduler, SchedulerBase

_CONSUMER_OPTIONS = ("concurrency", "batch_size", "lease", "timeout", "grace", "poll_interval", "name", "batch")


@click.command(short_help="Run the jobs of queues.")
@click.argument("targets", metavar="TARGET[=HANDLER]...", nargs=-1, required=True)
@click.option(
    "--handler",
    metavar="MODULE:FUNCTION",
    multiple=True,
    help="The handler of a queue class whose target names none; one for each such class, in the same order.",
)
@url_option
@click.option("--concurrency", type=click.IntRange(min=1), help="Number of handlers that run at once; 1 by default.")
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
@click.option("--name", help="Added to the worker's name in claimed_by and in the log.")
@click.option("--drain", is_flag=True, help="Exit when no job is due.")
@click.option(
    "--http",
    metavar="[HOST:]PORT",
    help="Serve /live, /ready and /metrics; on the loopback interface unless a host is given.",
)
@click.option("--otel", is_flag=True, help="Make spans and metrics by OpenTelemetry, as the process is set up for it.")
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    help="Number of worker processes to start; those that die are restarted.",
)
@log_level_option
@click.option("-v", "--verbose", is_flag=True, help="The same as --log-level debug: log every job.")
@click.pass_context
def worker(context: click.Context, /, *, processes: int | None, verbose: bool, **given: Any) -> None:
    """Run the jobs of one or more queues in one process, until SIGTERM or SIGINT.

    A queue class needs a handler: app:Email=app:send, or --handler app:send. A handler is a function
    handler(session, job) or a coroutine function. A Consumer or AsyncConsumer of your application, a list of them,
    or a function that returns either, has its own handler and database.

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
    )
    if given["http"] is not None:
        parse_address(given["http"])
    if processes is None:
        try:
            WorkerProcess(worker_options, lambda: None).run()
        except NotStoppedError as error:
            end_process(error)
        return
    if os.name != "posix":
        raise InputError("--processes needs a system with POSIX signals; start several workers instead")
    configure_logging(worker_options.log_level)
    context.exit(supervise(worker_options, processes))


@click.command(short_help="Fire schedules.")
@targets_argument
@url_option
@click.option("--reset", is_flag=True, help="Replace what was changed at run time by the program's definitions.")
@log_level_option
def scheduler(targets: Sequence[str], url: str | None, *, reset: bool, log_level: str | None) -> None:
    """Fire schedules until SIGTERM or SIGINT. Any number of these processes may run at once.

    A TARGET is a Schedule of your application, a list of them, or a queue class for the schedules that were added at
    run time; these need --url. Or it is one Scheduler or AsyncScheduler, which has its own database.
    """
    found = [load(text) for text in targets]
    schedulers = [each for each in found if isinstance(each, SchedulerBase)]
    engine: Any = None
    if schedulers:
        if len(found) > 1 or url is not None:
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
    configure_logging(log_level)
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
