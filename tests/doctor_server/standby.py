"""A standby of a server, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from tests.servers import Server, give_away

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = """
unix_socket_directories = '{directory}'
hot_standby_feedback = on
wal_receiver_status_interval = 1s
"""


@contextlib.contextmanager
def standby_of(primary: Server) -> Iterator[Server]:
    """Start a standby with hot_standby_feedback and without a slot."""
    directory = primary.directory.with_name(f"standby{secrets.token_hex(4)}")
    directory.mkdir()
    give_away(directory)
    standby = Server(primary.version, primary.bin_directory, directory)
    try:
        standby._execute("pg_basebackup", "-d", primary.dsn(), "-c", "fast", "-R")
        with (standby.data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS.format(directory=directory))
        standby.start()
        yield standby
    finally:
        standby.remove()
