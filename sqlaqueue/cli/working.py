"""The command ``worker``."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import click
from click.core import ParameterSource

from sqlaqueue.cli.errors import InputError
from sqlaqueue.cli.options import DURATION, url_option
from sqlaqueue.cli.order import Order, begin_log
from sqlaqueue.cli.serving import Service
from sqlaqueue.cli.supervising import supervise

_OF_CONSUMERS = ("concurrency", "batch_size", "lease", "timeout", "grace", "poll_interval", "name", "batch")


@click.command(short_help="Serve queues.")
@click.argument("targets", metavar="TARGET[=HANDLER]...", nargs=-1, required=True)
@click.option(
    "--handler",
    metavar="MODULE:FUNCTION",
    multiple=True,
    help="What handles the jobs of a queue class that has none of its own; one for each of them, in the same order.",
)
@url_option
@click.option("--concurrency", type=click.IntRange(min=1), help="How many handlers run at once; 1 by default.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="The most jobs that one claim takes; by default as many as are done within a second, up to 500.",
)
@click.option("--batch", is_flag=True, default=None, help="Call the handler with a list of jobs.")
@click.option("--lease", type=DURATION, help="How long a job stays with a worker that shows no sign of life.")
@click.option("--timeout", type=DURATION, help="After how long a handler has failed.")
@click.option("--grace", type=DURATION, help="How long handlers may go on after SIGTERM; 30s by default.")
@click.option("--poll-interval", type=DURATION, help="How often to look at an empty queue; 1s by default.")
@click.option("--name", help="Added to the worker's name in claimed_by and in the log.")
@click.option("--drain", is_flag=True, help="End when no job is due.")
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    help="Start so many worker processes, and start again what dies.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="From which level on to log; info by default. An application that has set up logging keeps its own.",
)
@click.option("-v", "--verbose", is_flag=True, help="The same as --log-level debug: tell of every job.")
@click.pass_context
def worker(context: click.Context, /, *, processes: int | None, verbose: bool, **given: Any) -> None:
    """Serve queues until SIGTERM or SIGINT; several targets are served side by side in one process.

    For a queue class, name its handler, as in app:Email=app:send or by --handler: a function handler(session, job), or
    a coroutine function. A Consumer or
    AsyncConsumer that you have made, a list of them, or a function that returns one, brings all it needs.

    The first signal lets handlers finish within their grace period and gives other jobs back; a second one ends the
    worker at once. Neither loses a job.
    """
    options = {name: given[name] for name in _OF_CONSUMERS if given[name] is not None}
    of_class = ("handler", "url", *_OF_CONSUMERS)
    order = Order(
        targets=list(given["targets"]),
        handlers=list(given["handler"]),
        url=given["url"],
        options={
            name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in options.items()
        },
        said=[name for name in of_class if context.get_parameter_source(name) is ParameterSource.COMMANDLINE],
        drain=given["drain"],
        log_level="debug" if verbose else given["log_level"],
    )
    if processes is None:
        Service(order, lambda: None).run()
        return
    if os.name != "posix":
        raise InputError("--processes needs a system with POSIX signals; start several workers instead")
    begin_log(order.log_level)
    context.exit(supervise(order, processes))
