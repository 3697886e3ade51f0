"""The command line ``sqlaqueue``: a click group with a command for each operation."""

from __future__ import annotations

try:
    import click
    import rich  # noqa: F401 - the commands need it
except ModuleNotFoundError as missing:
    msg = f"The command line needs {missing.name}: pip install 'sqlaqueue[cli]'"
    raise SystemExit(msg) from None

from sqlaqueue import __version__
from sqlaqueue.cli.commands.bench import bench
from sqlaqueue.cli.commands.change import cancel, purge, reconcile, requeue, rescue
from sqlaqueue.cli.commands.demo import alembic_template, demo
from sqlaqueue.cli.commands.doctor import doctor
from sqlaqueue.cli.commands.health import health
from sqlaqueue.cli.commands.inspect import failed, stats, workers
from sqlaqueue.cli.commands.jobs import job, jobs
from sqlaqueue.cli.commands.metrics import metrics
from sqlaqueue.cli.commands.pause_resume import pause, resume
from sqlaqueue.cli.commands.scheduler import scheduler
from sqlaqueue.cli.commands.schedules import schedules
from sqlaqueue.cli.commands.web import web
from sqlaqueue.cli.commands.why import why
from sqlaqueue.cli.commands.worker import worker
from sqlaqueue.cli.shared.settings import apply_settings


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SQLAQUEUE"})
@click.version_option(__version__, prog_name="sqlaqueue")
@click.pass_context
def main(context: click.Context) -> None:
    """Job queues in PostgreSQL, made of your own SQLAlchemy models.

    A TARGET is a queue class, such as app.models:Email, or a Consumer of your application, such as
    app.queues:consumer. Options can also be set in the environment (SQLAQUEUE_URL, SQLAQUEUE_WORKER_CONCURRENCY) and
    in the table [tool.sqlaqueue] of the nearest pyproject.toml.

    Exit codes: 0 success, 1 failure, 2 wrong input, 3 the database does not answer or lacks what the queue needs.
    """
    apply_settings(context)


for command in (
    worker,
    scheduler,
    schedules,
    stats,
    failed,
    jobs,
    job,
    why,
    doctor,
    workers,
    health,
    metrics,
    web,
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
