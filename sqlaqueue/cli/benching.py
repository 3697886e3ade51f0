"""The command ``sqlaqueue bench``: what it prints of :func:`sqlaqueue.benchmark.run_benchmark`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from sqlaqueue.benchmark.run import PREFIX, Benchmark, BenchmarkError, run_benchmark
from sqlaqueue.cli.ending import tidy_end
from sqlaqueue.exc import SqlaqueueError

_DRIVERS = {"psycopg", "psycopg2", "pg8000"}
STRATEGIES = ("update_status", "delete_returning", "batch_select")


@click.command(short_help="Measure a queue of your model's shape on your own database.")
@click.argument("model", required=False, metavar="[MODULE:CLASS]")
@click.option(
    "--url",
    required=True,
    envvar="SQLAQUEUE_URL",
    help="The database, postgresql://...; it is busy for as long as this runs.",
)
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Another strategy than the model's.")
@click.option("--jobs", type=click.IntRange(100, 10_000_000), default=10_000, show_default=True, help="How many jobs.")
@click.option(
    "--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="How many processes work on them."
)
@click.option(
    "--batch-size", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The most jobs a claim takes."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Handlers at once, in each process.",
)
@click.option(
    "--singles",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="How many jobs are sent one by one, for the time until they begin.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(  # noqa: PLR0917 - click passes options by their names
    model: str | None,
    url: str,
    strategy: str | None,
    jobs: int,
    processes: int,
    batch_size: int,
    concurrency: int,
    singles: int,
    as_json: bool,  # noqa: FBT001 - the same
) -> None:
    """Enqueue jobs that do nothing, let worker processes do them, and time both; then time single jobs.

    MODULE:CLASS is a queue class of yours. A table with columns of the same types is made for it, in a new schema
    sqlaqueue_bench_..., which is dropped in the end; only a run that is killed leaves it behind. No table, sequence,
    type or default of yours is read or written. Without MODULE:CLASS, a queue with a key and a text is measured.

    The handlers do nothing, so the figures are what the queue itself can do at the most, on this database, over this
    network, from this machine.
    """
    # As python -m does: the model's module is often one of the working directory.
    sys.path.insert(0, str(Path.cwd()))
    try:
        with tidy_end():
            found = run_benchmark(
                _address(url),
                model,
                strategy=strategy,
                jobs=jobs,
                processes=processes,
                batch_size=batch_size,
                concurrency=concurrency,
                singles=singles,
            )
    except ModuleNotFoundError as error:
        if error.name not in _DRIVERS:
            raise
        msg = f"--url: its driver {error.name} is not installed: pip install 'sqlaqueue[psycopg]' brings psycopg"
        raise click.UsageError(msg) from None
    except (SqlaqueueError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except (BenchmarkError, DBAPIError) as error:
        told = error.orig if isinstance(error, DBAPIError) else error
        msg = f"{told}\nThe schema {PREFIX}... has been dropped, if the database could be reached."
        raise click.ClickException(msg) from error
    click.echo(json.dumps(asdict(found) | {"picked_up": _percentiles(found)}) if as_json else _words(found))


def _address(url: str) -> str:
    try:
        address = sa.make_url(url)
        if address.drivername in {"postgresql", "postgres"}:
            address = address.set(drivername="postgresql+psycopg")
        is_async = address.get_dialect().is_async
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        msg = f"--url: {error}; give something like postgresql://user:password@host/database"
        raise click.UsageError(msg) from None
    if address.get_backend_name() != "postgresql" or is_async:
        msg = f"--url: {address.drivername}:// is not served; give a URL of PostgreSQL with a synchronous driver"
        raise click.UsageError(msg)
    return address.render_as_string(hide_password=False)


def _percentiles(found: Benchmark) -> dict[str, float]:
    return {"p50": found.picked_up_within(0.5), "p99": found.picked_up_within(0.99)}


def _words(found: Benchmark) -> str:
    processes = "1 process" if found.processes == 1 else f"{found.processes} processes"
    picked_up = {name: seconds * 1000 for name, seconds in _percentiles(found).items()}
    return (
        f"{found.strategy}, {found.jobs} jobs, {processes}, batches of {found.batch_size}, "
        f"concurrency {found.concurrency}\n"
        f"  enqueued by session.add_all()    {found.enqueued_per_second:>10,.0f} rows a second\n"
        f"  done, with an empty handler      {found.done_per_second:>10,.0f} jobs a second\n"
        f"  a single job begins after        {picked_up['p50']:>10.1f} ms, half of them;"
        f" {picked_up['p99']:.1f} ms, 99 in 100"
    )
