"""The command ``metrics``: an exporter for Prometheus, its dashboard and its alert rules."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy.orm import Session

from sqlaqueue.cli.processes.http_server import serving_metrics
from sqlaqueue.cli.processes.process_settings import configure_logging
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import FAILED, FailedError, InputError, command_errors, first_line
from sqlaqueue.cli.shared.interrupt import clean_interrupt
from sqlaqueue.cli.shared.options import DURATION, url_option
from sqlaqueue.cli.shared.targets import Target, load_targets
from sqlaqueue.log import fields, logger
from sqlaqueue.write_routing import execute

if TYPE_CHECKING:
    from sqlaqueue.prometheus.queues import QueueReader, Reading, ScrapeCollector


@click.command(short_help="Export gauges of queues to Prometheus.")
@click.argument("targets", metavar="[TARGET]...", nargs=-1)
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
@click.option("--max-age", type=DURATION, default="10s", show_default=True, help="Serve a result again for this time.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana and exit.")
@click.option("--alerts", is_flag=True, help="Print alert rules for Prometheus and exit.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="Lowest level to log; info by default. The logging configuration of an application is kept.",
)
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
    options = {
        "count_limit": count_limit,
        "statement_timeout": statement_timeout,
        "max_age": max_age,
        "finished": finished,
    }
    configure_logging(log_level)
    with contextlib.ExitStack() as stack:
        databases = _databases(loaded, url, stack)
        collector = _collector(loaded, databases, options)
        if once:
            _print(collector)
            return
        for target, database in databases:
            with command_errors(target.spec):
                # A database that never answers is most likely a wrong URL. One that stops later is waited for.
                database.run(_connect, target.model)
        _serve(collector, host, port)


def _import() -> Any:
    try:
        from sqlaqueue import prometheus  # noqa: PLC0415 - it needs an extra, which the other commands do not
    except ModuleNotFoundError as error:
        raise InputError(str(error)) from None
    return prometheus


def _databases(
    targets: Sequence[Target], url: str | None, stack: contextlib.ExitStack
) -> list[tuple[Target, Database]]:
    """Return the database of each target, one for all if their URL is given."""
    if url is not None:
        shared = stack.enter_context(Database.of(targets[0], url))
        return [(target, shared) for target in targets]
    return [(target, stack.enter_context(Database.of(target, None))) for target in targets]


def _collector(
    targets: Sequence[Target], databases: Sequence[tuple[Target, Database]], options: dict[str, Any]
) -> ScrapeCollector:
    from sqlaqueue.prometheus.queues import Scrape, ScrapeCollector, ScrapeOptions  # noqa: PLC0415 - it needs an extra

    with command_errors():
        scrape = Scrape([target.model for target in targets], "sqlaqueue metrics", ScrapeOptions(**options))
    by_queue = {target.spec.name: database for target, database in reversed(databases)}

    def read(reader: QueueReader) -> Reading:
        return by_queue[reader.spec.name].run(_read, reader)

    return ScrapeCollector(scrape, read)


def _read(session: Session, reader: QueueReader) -> Reading:
    result: Reading = execute(session, reader.read)
    return result


def _connect(session: Session, model: type[Any]) -> None:
    session.connection(bind_arguments={"mapper": model})


def _print(collector: ScrapeCollector) -> None:
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - as above

    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    click.echo(text, nl=False)
    if any(line.startswith("sqlaqueue_scrape_success{") and line.endswith(" 0.0") for line in text.splitlines()):
        click.get_current_context().exit(FAILED)


def _serve(collector: ScrapeCollector, host: str, port: int) -> None:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415 - as above

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
