"""The command line ``sqlaqueue``: a thin group of commands, each a door to a part of the package."""

from __future__ import annotations

try:
    import click
    import rich  # noqa: F401 - whether it is there
except ModuleNotFoundError as missing:
    msg = f"The command line needs {missing.name}: pip install 'sqlaqueue[cli]'"
    raise SystemExit(msg) from None

from sqlaqueue import __version__
from sqlaqueue.cli.benching import bench
from sqlaqueue.cli.changing import cancel, purge, reconcile, requeue, rescue
from sqlaqueue.cli.controlling import pause, resume
from sqlaqueue.cli.demonstrating import alembic_template, demo
from sqlaqueue.cli.listing import job, jobs
from sqlaqueue.cli.looking import failed, stats, workers
from sqlaqueue.cli.settings import use_settings
from sqlaqueue.cli.working import worker


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SQLAQUEUE"})
@click.version_option(__version__, prog_name="sqlaqueue")
@click.pass_context
def main(context: click.Context) -> None:
    """Job queues in PostgreSQL, made of your own SQLAlchemy models.

    A TARGET is a queue class, as in app.models:Email, or a Consumer of yours, as in app.queues:consumer. Options can
    also be set in the environment (SQLAQUEUE_URL, SQLAQUEUE_WORKER_CONCURRENCY) and in the table [tool.sqlaqueue] of
    the nearest pyproject.toml.

    Exit codes: 0 done, 1 failed, 2 wrong input, 3 the database does not answer or lacks what the queue needs.
    """
    use_settings(context)


for command in (
    worker,
    stats,
    failed,
    jobs,
    job,
    workers,
    requeue,
    cancel,
    purge,
    rescue,
    reconcile,
    pause,
    resume,
    bench,
    demo,
    alembic_template,
):
    main.add_command(command)
