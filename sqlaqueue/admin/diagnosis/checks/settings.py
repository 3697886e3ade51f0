"""Fixes: the SQL that changes a setting of the server, and the command that leads workers to another server."""

from __future__ import annotations

from urllib.parse import quote

from sqlaqueue.postgresql.catalog_text import quoted
from sqlaqueue.postgresql.facts import ServerState


def change_setting(server: ServerState, name: str, value: str) -> str:
    """Return the statements that give a setting another value for all new sessions like the current one."""
    database, role = quoted(server.database), quoted(server.role)
    source = server.settings[name].source
    if source in {"client", "session"}:
        return f"-- Remove it from the options of the engine.\nSET {name} = {value};"
    if source == "command line":
        return f"postgres -c {name}={value}  # with the other options with which the server was started"
    where = {
        "database": f"DATABASE {database}",
        "user": f"ROLE {role}",
        "database user": f"ROLE {role} IN DATABASE {database}",
    }.get(source)
    if where is not None:
        return f"ALTER {where} RESET {name};"
    return f"ALTER SYSTEM SET {name} = {value};\nSELECT pg_reload_conf();"


def use_server(server: ServerState, address: str, port: int) -> str:
    """Return the command that gives workers the address of a server, with the role and the database of ``server``."""
    user, name = quote(server.role, safe=""), quote(server.database, safe="")
    host, query = address, ""
    if host.startswith("/"):
        host, query = "", f"?host={quote(host)}&port={port}"
    elif ":" in host:
        host = f"[{host}]"
    place = f"{host}:{port}" if host else ""
    return f"export SQLAQUEUE_URL='postgresql+psycopg://{user}@{place}/{name}{query}'  # for workers"
