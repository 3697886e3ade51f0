"""The command ``scheduler``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import click
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.cli.processes.process_settings import configure_logging
from sqlaqueue.cli.shared.database import Database, engine_for, parse_url
from sqlaqueue.cli.shared.errors import InputError, command_errors
from sqlaqueue.cli.shared.options import targets_argument, url_option
from sqlaqueue.cli.shared.targets import load
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.scheduler import Scheduler, SchedulerBase


@click.command(short_help="Fire schedules.")
@targets_argument
@url_option
@click.option("--reset", is_flag=True, help="Replace what was changed at run time by the program's definitions.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="Lowest level to log; info by default. The logging configuration of an application is kept.",
)
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
        with Database(made.session_factory) as database:
            # A database that never answers is most likely a wrong URL. One that stops answering later is waited for.
            database.run(_connect, spec)
        try:
            if isinstance(made, Scheduler):
                made.run()
            else:
                asyncio.run(_run(made, engine))
        finally:
            if isinstance(engine, sa.Engine):
                engine.dispose()


def _scheduler(engine: Any, schedules: Sequence[Any], *, reset: bool) -> SchedulerBase:
    if isinstance(engine, sa.Engine):
        return Scheduler(sessionmaker(engine), schedules, reset=reset)
    from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - needs greenlet, which sync code does not

    from sqlaqueue.async_scheduler import AsyncScheduler  # noqa: PLC0415 - as above

    return AsyncScheduler(async_sessionmaker(engine), schedules, reset=reset)


async def _run(scheduler: Any, engine: Any) -> None:
    await scheduler.run()
    if engine is not None:
        # Its connections cannot be closed after their event loop.
        await engine.dispose()


def _connect(session: Session, spec: QueueSpec) -> None:
    session.connection(bind_arguments={"mapper": spec.mapper})
