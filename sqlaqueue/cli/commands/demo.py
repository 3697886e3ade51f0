"""The commands ``demo`` and ``alembic-template``."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from sqlaqueue.cli.shared.interrupt import clean_interrupt
from sqlaqueue.cli.shared.options import STRATEGIES
from sqlaqueue.demo.demo import Display
from sqlaqueue.demo.models import CannotRunError


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
    sqlite: bool,  # noqa: FBT001 - as above
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
        msg = f"The database failed during the demo: {error.orig}"
        raise click.ClickException(msg) from error
    sys.exit(0 if passed else 1)


def _templates() -> Path:
    # A wheel has them inside the package, a clone beside it.
    package = Path(__file__).parents[2]
    shipped = package / "alembic_templates"
    return shipped if shipped.is_dir() else package.parent / "alembic_templates"


@click.command("alembic-template", short_help="Print the path of an Alembic template.")
@click.argument("name", type=click.Choice(sorted(each.name for each in _templates().glob("[!_.]*"))))
def alembic_template(name: str) -> None:
    """Print the path of a template, for `alembic init -t "$(sqlaqueue alembic-template sync)" migrations`."""
    click.echo(_templates() / name)
