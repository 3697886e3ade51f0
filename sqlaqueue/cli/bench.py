"""The command ``bench``, which prints the result of :func:`sqlaqueue.benchmark.run_benchmark`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
import sqlalchemy as sa
from rich.console import Console
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from sqlaqueue.benchmark import PREFIX, Benchmark, BenchmarkError, run_benchmark
from sqlaqueue.cli.output import STRATEGIES, clean_interrupt
from sqlaqueue.demo.demo import Display
from sqlaqueue.demo.models import CannotRunError
from sqlaqueue.exc import SqlaqueueError

_DRIVERS = {"psycopg", "psycopg2", "pg8000"}


@click.command(short_help="Benchmark a copy of your queue in your own database.")
@click.argument("model", required=False, metavar="[MODULE:CLASS]")
@click.option(
    "--url", required=True, envvar="SQLAQUEUE_URL", help="The database, postgresql://...; the benchmark keeps it busy."
)
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Overrides the model's strategy.")
@click.option("--jobs", type=click.IntRange(100, 10_000_000), default=10_000, show_default=True, help="Number of jobs.")
@click.option(
    "--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of worker processes."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Maximum number of jobs per claim.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Number of handlers that run at the same time in each process.",
)
@click.option(
    "--singles",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="Number of jobs that are enqueued one by one to measure the latency.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(  # noqa: PLR0917 - click passes options by their names
    model: str | None,
    url: str,
    strategy: str | None,
    jobs: int,
    processes: int,
    batch_size: int,
    concurrency: int,
    singles: int,
    as_json: bool,  # noqa: FBT001 - click passes the flag by its name
) -> None:
    """Measure how fast jobs that do nothing are enqueued and run, and how soon a single job starts.

    MODULE:CLASS is your queue class. The benchmark creates a table with columns of the same types in a new schema
    sqlaqueue_bench_..., which it drops afterwards; only a killed benchmark leaves the schema behind. It does not read
    or write your tables, sequences, types or defaults. Without MODULE:CLASS it measures a queue with a key and a text.

    As the handlers do nothing, the figures are the upper limit for this queue with this database, network and machine.
    """
    # As python -m does: the model's module is often in the working directory.
    sys.path.insert(0, str(Path.cwd()))
    try:
        with clean_interrupt():
            result = run_benchmark(
                _with_driver(url),
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
        raise click.UsageError(
            f"--url: its driver {error.name} is not installed: pip install 'sqlaqueue[psycopg]' installs psycopg"
        ) from None
    except (SqlaqueueError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except (BenchmarkError, DBAPIError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise click.ClickException(
            f"{cause}\nThe schema {PREFIX}... has been dropped, if the database could be reached."
        ) from error
    if as_json:
        click.echo(json.dumps(asdict(result) | {"picked_up": _percentiles(result)}))
    else:
        click.echo(_report(result))


def _with_driver(text: str) -> str:
    try:
        url = sa.make_url(text)
        if url.drivername in {"postgresql", "postgres"}:
            url = url.set(drivername="postgresql+psycopg")
        is_async = url.get_dialect().is_async
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise click.UsageError(f"--url: {error}; give a URL such as postgresql://user:password@host/database") from None
    if url.get_backend_name() != "postgresql" or is_async:
        raise click.UsageError(
            f"--url: {url.drivername}:// is not supported; give a URL of PostgreSQL with a synchronous driver"
        )
    return url.render_as_string(hide_password=False)


def _percentiles(result: Benchmark) -> dict[str, float]:
    return {"p50": result.picked_up_within(0.5), "p99": result.picked_up_within(0.99)}


def _report(result: Benchmark) -> str:
    processes = "1 process" if result.processes == 1 else f"{result.processes} processes"
    latency = {name: seconds * 1000 for name, seconds in _percentiles(result).items()}
    return (
        f"{result.strategy}, {result.jobs} jobs, {processes}, batches of {result.batch_size}, "
        f"concurrency {result.concurrency}\n"
        f"  enqueued by session.add_all()    {result.enqueued_per_second:>10,.0f} rows/s\n"
        f"  completed, with an empty handler {result.done_per_second:>10,.0f} jobs/s\n"
        f"  latency of a single job          {latency['p50']:>10.1f} ms (median), {latency['p99']:.1f} ms (p99)"
    )


@click.command(short_help="Run real jobs, kill a worker, check the result.")
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory to read; Python's standard library by default.",
)
@click.option(
    "--strategy",
    type=click.Choice([*STRATEGIES, "all"]),
    default="update_status",
    show_default=True,
    help="The claim strategy; all: one after the other.",
)
@click.option(
    "--workers",
    # One of them is killed, and another one has to run its jobs.
    type=click.IntRange(2, 64),
    default=4,
    show_default=True,
    help="Number of worker processes.",
)
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=25, show_default=True, help="Maximum number of jobs per claim."
)
@click.option("--url", help="Your own PostgreSQL, postgresql://...; by default an embedded server is started.")
@click.option("--sqlite", is_flag=True, help="Use a file of SQLite in a temporary directory, and no server.")
def demo(  # noqa: PLR0917 - click passes options by their names
    path: Path | None,
    strategy: str,
    workers: int,
    batch: int,
    url: str | None,
    sqlite: bool,  # noqa: FBT001 - click passes the flag by its name
) -> None:
    """Enqueue a job for every file of a directory, run them in several processes, and kill one with SIGKILL.

    Each job stores the SHA-256 digest, the size and the number of lines of its file. Afterwards all files are read
    again and compared with the table: every file exactly once, none lost. The exit code is 0 if that holds, 1 if not,
    and 2 if the demo could not start.

    Without --url the demo uses a PostgreSQL server in a temporary directory; with --sqlite, a file. With --url it uses
    a schema sqlaqueue_demo in your database, which must not exist before and is dropped afterwards.
    """
    from sqlaqueue.demo.demo import run  # noqa: PLC0415 - the other commands need not import it

    if sqlite and (url is not None or strategy != "update_status"):
        raise click.UsageError("--sqlite: a file needs no --url, and only --strategy update_status can be used with it")
    strategies = STRATEGIES if strategy == "all" else (strategy,)
    try:
        with clean_interrupt():
            display = Display(Console(highlight=False))
            passed = run(strategies, path, url, workers=workers, batch=batch, display=display, sqlite=sqlite)
    except CannotRunError as error:
        raise click.UsageError(str(error)) from None
    except DBAPIError as error:
        raise click.ClickException(f"The database failed during the demo: {error.orig}") from error
    sys.exit(0 if passed else 1)


def _templates() -> Path:
    # A wheel has them inside the package, a clone beside it.
    package = Path(__file__).parents[1]
    shipped = package / "alembic_templates"
    return shipped if shipped.is_dir() else package.parent / "alembic_templates"


@click.command("alembic-template", short_help="Print the path of an Alembic template.")
@click.argument("name", type=click.Choice(sorted(each.name for each in _templates().glob("[!_.]*"))))
def alembic_template(name: str) -> None:
    """Print the path of a template, for `alembic init -t "$(sqlaqueue alembic-template sync)" migrations`."""
    click.echo(_templates() / name)
