"""The command ``health``: whether a worker is alive and ready, and whether queues are served."""

from __future__ import annotations

import json as json_module
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import click
from sqlalchemy.orm import Session

from sqlaqueue.cli.processes.http_server import parse_address
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import FAILED, DatabaseError, FailedError, InputError, command_errors, first_line
from sqlaqueue.cli.shared.options import DURATION, json_option, url_option
from sqlaqueue.cli.shared.output import echo, echo_json
from sqlaqueue.cli.shared.targets import load_targets
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements import verbs
from sqlaqueue.telemetry.health_app import LIVE, READY

_LARGEST_ANSWER = 1_000_000


@click.command(short_help="Check whether a worker is alive and ready, or whether queues are served.")
@click.argument("checked", metavar="ADDRESS|TARGET...", nargs=-1, required=True)
@click.option("--live", is_flag=True, help="Ask a worker only whether it is alive: if not, it should be restarted.")
@click.option("--timeout", type=DURATION, default="5s", show_default=True, help="Time for a worker to answer.")
@url_option
@json_option
def health(checked: Sequence[str], url: str | None, timeout: Any, *, live: bool, json: bool) -> None:
    """Check a worker by the address of its endpoint, or queues by their Consumers in the database.

    An ADDRESS is what `sqlaqueue worker --http` was given: a port, a host and a port, or a URL. A worker is ready when
    it claims jobs, and alive as long as it goes on by itself, with or without its database.

    A TARGET is ready if the database has what the queue needs, and a Consumer has sent a heartbeat recently. This needs
    SELECT on sqlaqueue_consumer.

    The exit code is 0 if all are alive or ready, 1 if not, also without a database, and 2 for wrong input.
    """
    rows = [
        _worker(_url_of(each), LIVE if live else READY, timeout.total_seconds())
        if _is_address(each)
        else _queue(each, url, live=live)
        for each in checked
    ]
    results = [row for found in rows for row in found]
    if json:
        echo_json(results)
    else:
        for row in results:
            good = "alive" if live else "ready"
            echo(f"{row['name']}: {good if row['ok'] else f'not {good}: ' + '; '.join(row['problems'])}")
    if not all(row["ok"] for row in results):
        click.get_current_context().exit(FAILED)


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://")) or text.rpartition(":")[2].isdecimal()


def _url_of(text: str) -> str:
    if text.startswith(("http://", "https://")):
        return text.rstrip("/")
    host, port = parse_address(text, "")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _worker(url: str, path: str, timeout: float) -> list[dict[str, Any]]:
    """Ask a worker, and return a row for each of its Consumers, or for each of its processes."""
    name = urlsplit(url).netloc
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=timeout) as answer:  # noqa: S310 - its scheme is http or https
            content = answer.read(_LARGEST_ANSWER)
    except urllib.error.HTTPError as refused:
        content = refused.read(_LARGEST_ANSWER)
        refused.close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        text = first_line(reason) if isinstance(reason, BaseException) else str(reason)
        return [{"name": name, "ok": False, "problems": [f"no worker answers: {text}"]}]
    try:
        queues = json_module.loads(content)["queues"]
        asked = "alive" if path == LIVE else "ready"
        return [
            {"name": f"{name} {queue}", "ok": bool(each[asked]), "problems": [*each["problems"]]}
            for queue, each in queues.items()
        ] or [{"name": name, "ok": path == LIVE, "problems": ["it is starting"]}]
    except (ValueError, LookupError, TypeError, AttributeError):
        return [{"name": name, "ok": False, "problems": [f"{url}{path} is not the endpoint of a worker"]}]


def _queue(text: str, url: str | None, *, live: bool) -> list[dict[str, Any]]:
    """Check the queues of a target."""
    if live:
        raise InputError(f"--live: {text} is a queue; give the address of a worker, as in its option --http")
    rows = []
    for target in load_targets([text]):
        number, problems = 0, ["no Consumer is alive"]
        with Database.of(target, url) as database:
            try:
                with command_errors(target.spec):
                    number = database.run(_live_consumers, target.model, target.spec)
            except (DatabaseError, FailedError) as error:
                problems = [error.message]
        if number:
            problems = []
        rows.append({"name": target.spec.name, "ok": bool(number), "problems": problems, "consumers": number})
    return rows


def _live_consumers(session: Session, model: type[Any], spec: QueueSpec) -> int:
    # Not check_ready(), which needs the privileges of a worker: a probe may only be allowed to read heartbeats.
    connection = session.connection(bind_arguments={"mapper": model})
    checks_of(connection).check_complete(connection, spec)
    return len(session.execute(verbs.consumers(model), bind_arguments={"mapper": model}).all())
