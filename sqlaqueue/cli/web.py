"""The command ``web``: the dashboard, without an application to mount it in."""

from __future__ import annotations

import asyncio
import getpass
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import click

from sqlaqueue.cli.database import Target, TargetDatabase, engine_for, load, load_targets, parse_url, session_factory_of
from sqlaqueue.cli.output import (
    FailedError,
    InputError,
    clean_interrupt,
    command_errors,
    first_line,
    log_level_option,
    targets_argument,
    url_option,
)
from sqlaqueue.cli.processes import configure_logging

_GRACE = 2
"""Seconds for the requests that are being answered when the command is stopped."""


@click.command(short_help="Show queues in the browser, and change their jobs.")
@targets_argument
@url_option
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="The port to listen on.")
@click.option("--read-only", is_flag=True, help="Show everything, and change nothing.")
@click.option("--redact", metavar="COLUMN", multiple=True, help="Do not show this column; may be repeated.")
@click.option(
    "--access",
    metavar="MODULE:FUNCTION",
    help="Let this access rule of your application decide, instead of a link that can be used once.",
)
@click.option(
    "--origin", metavar="URL", multiple=True, help="An address under which browsers reach it; may be repeated."
)
@log_level_option
def web(
    targets: Sequence[str],
    url: str | None,
    *,
    host: str,
    port: int,
    read_only: bool,
    redact: Sequence[str],
    access: str | None,
    origin: Sequence[str],
    log_level: str | None,
) -> None:
    """Show queues in the browser, and change their jobs, until SIGINT or SIGTERM.

    It serves this machine only, and prints a link that signs in one browser, once. A TARGET may also be a module, such
    as app.models, for all queue classes in it.

    For other machines, mount sqlaqueue.web.Dashboard in your application, which knows its users.
    """
    dashboard_module = _import()
    rule: Any = None if access is None else load(access)
    if access is not None and not callable(rule):
        raise InputError(
            f"--access {access}: it is {rule!r}; name a function that takes a request and returns an Access"
        )
    if access is not None and read_only:
        raise InputError("--read-only: what may be changed is decided by the rule of --access; give one of the two")
    if rule is None and not _is_loopback(host):
        raise InputError(
            f"--host {host}: without an access rule, only this machine is served. Mount sqlaqueue.web.Dashboard in "
            "your application, which knows its users, or give --access app.module:function"
        )
    loaded = load_targets(targets, modules=True)
    configure_logging(log_level)
    if url is None:
        _check_one_database(loaded)
    with command_errors():
        for target in loaded[: None if url is None else 1]:
            with TargetDatabase.of(target, url) as database:
                database.connect(target.model)
    user = loaded[0].consumer or loaded[0].scheduler
    engine = None if url is None and user is not None else engine_for(parse_url(url or ""))
    factory = session_factory_of(engine) if user is None or engine is not None else user.session_factory
    with command_errors():
        app = dashboard_module.Dashboard(
            [target.model for target in loaded],
            factory,
            # Behind the token is the one who has started the command.
            access=rule or (lambda _: dashboard_module.Access(read=True, act=not read_only, user=_user())),
            redact=redact,
            origins=origin,
        )
    _serve(app, host, port, engine, has_token=rule is None)


def _import() -> Any:
    try:
        import uvicorn  # noqa: F401, PLC0415 - it needs an extra, which the other commands do not

        from sqlaqueue import web as dashboard_module  # noqa: PLC0415 - it needs an extra
    except ModuleNotFoundError as error:
        missing = "sqlaqueue.web needs uvicorn: pip install 'sqlaqueue[web]'" if error.name == "uvicorn" else str(error)
        raise InputError(missing) from None
    return dashboard_module


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_one_database(targets: Sequence[Target]) -> None:
    users = [target.consumer or target.scheduler for target in targets]
    if len({id(user.session_factory) for user in users if user is not None}) > 1:
        raise InputError(
            f"{', '.join(dict.fromkeys(target.text for target in targets))}: they have several session factories, and "
            "a dashboard has one; give --url, or set SQLAQUEUE_URL"
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # there is no such account, as in some containers
        return "sqlaqueue web"


def _serve(app: Any, host: str, port: int, engine: Any, *, has_token: bool) -> None:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        bound = socket.create_server((address, port), family=family)
    except OSError as error:
        raise FailedError(f"--host {host} --port {port}: {first_line(error)}") from error
    port = bound.getsockname()[1]
    origin = f"http://[{address}]:{port}" if family == socket.AF_INET6 else f"http://{address}:{port}"
    if has_token:
        from sqlaqueue.web.security import OneTimeToken  # noqa: PLC0415 - it needs an extra

        app = OneTimeToken(app, origin=origin, announce=_announce)
        _announce(app.new_link())
    else:
        click.echo(f"The dashboard is at {origin}/")
    with bound, clean_interrupt():
        asyncio.run(_run(app, bound, engine))


def _announce(link: str) -> None:
    # At once, also into a pipe: nothing else tells the user where to go.
    click.echo(f"Open {link}\nThe link works once, within ten minutes. Ctrl-C ends the dashboard.")


async def _run(app: Any, bound: socket.socket, engine: Any) -> None:
    import uvicorn  # noqa: PLC0415 - it needs an extra

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        # The log would contain the token, and keys of jobs.
        access_log=False,
        ws="none",
        server_header=False,
        # Headers of a proxy can be sent by any local program.
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
    try:
        await uvicorn.Server(config).serve(sockets=[bound])
    except KeyboardInterrupt:
        pass  # it raises the signal again when it has stopped
    finally:
        if engine is not None:
            disposing: Any = engine.dispose()
            if disposing is not None:
                await disposing
