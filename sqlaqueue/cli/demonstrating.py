"""The commands ``demo`` and ``alembic-template``."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from sqlaqueue.cli.ending import tidy_end
from sqlaqueue.demo.display import Display
from sqlaqueue.demo.errors import CannotRunError

STRATEGIES = ("update_status", "delete_returning", "batch_select")


@click.command(short_help="Run real jobs, kill a worker, check the result.")
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory to read; by default Python's standard library.",
)
@click.option(
    "--strategy",
    type=click.Choice([*STRATEGIES, "all"]),
    default="update_status",
    show_default=True,
    help="How workers claim jobs; all: one after the other.",
)
@click.option(
    "--workers",
    # One of them is killed, and somebody has to do its jobs.
    type=click.IntRange(2, 64),
    default=4,
    show_default=True,
    help="How many worker processes.",
)
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=25, show_default=True, help="The most jobs a claim takes."
)
@click.option("--url", help="Your own PostgreSQL, postgresql://...; by default an embedded one is started.")
def demo(path: Path | None, strategy: str, workers: int, batch: int, url: str | None) -> None:
    """Enqueue a job for every file of a directory, run them in several processes, and kill one with SIGKILL.

    Each job stores the SHA-256, the size and the number of lines of its file. In the end all files are read again and
    compared with the table: every file exactly once, none lost. The exit code is 0 if that holds, 1 if it does not,
    and 2 if the demo could not begin.

    Without --url everything happens on a PostgreSQL in a temporary directory. With it, in the schema sqlaqueue_demo of
    your database, which must not exist yet, and is dropped in the end.
    """
    try:
        from sqlaqueue.demo.run import run  # noqa: PLC0415 - it needs what the other commands can do without
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise click.UsageError("The demo needs psycopg: pip install 'sqlaqueue[demo]'") from None
    strategies = STRATEGIES if strategy == "all" else (strategy,)
    try:
        with tidy_end():
            held = run(strategies, path, url, workers=workers, batch=batch, display=Display(Console(highlight=False)))
    except CannotRunError as error:
        raise click.UsageError(str(error)) from None
    except DBAPIError as error:
        msg = f"The database failed while the demo ran: {error.orig}"
        raise click.ClickException(msg) from error
    sys.exit(0 if held else 1)


def _templates() -> Path:
    # A wheel has them in the package, a clone beside it.
    package = Path(__file__).parent.parent
    shipped = package / "alembic_templates"
    return shipped if shipped.is_dir() else package.parent / "alembic_templates"


@click.command("alembic-template", short_help="Print where a template for Alembic is.")
@click.argument("name", type=click.Choice(sorted(each.name for each in _templates().glob("[!_.]*"))))
def alembic_template(name: str) -> None:
    """Print the path of a template, for `alembic init -t "$(sqlaqueue alembic-template sync)" migrations`."""
    click.echo(_templates() / name)
