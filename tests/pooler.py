"""PgBouncer in front of a database, for as long as a test needs it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, Self

from tests.servers import Database, give_away, server_account

PROGRAM = shutil.which("pgbouncer", path=f"{os.defpath}:/usr/sbin:/usr/local/sbin")
Mode = Literal["session", "transaction"]

SETTINGS = """
[databases]
* = host={directory} port=5432 user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
"""


def version() -> tuple[int, ...]:
    """Return the version of PgBouncer; from 1.21 on it can keep track of prepared statements."""
    assert PROGRAM is not None
    printed = subprocess.check_output([PROGRAM, "--version"], text=True)
    found = re.search(r"PgBouncer (\d+)\.(\d+)", printed)
    assert found is not None
    return int(found[1]), int(found[2])


class Pooler:
    """One PgBouncer, before all databases of a server.

    :param size: how many connections to the server it has for a database.
    """

    def __init__(self, database: Database, mode: Mode, size: int = 5) -> None:
        self._database, self._mode, self._size = database, mode, size

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        # Another process could bind the port before PgBouncer does. The port is random, so this is unlikely.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._home = Path(tempfile.mkdtemp(prefix="sqlaqueue-pooler-"))
        settings = SETTINGS.format(
            directory=self._database.server.directory, port=self.port, mode=self._mode, size=self._size
        )
        (self._home / "pgbouncer.ini").write_text(settings)
        give_away(self._home)
        account = server_account()
        identity: dict[str, Any] = (
            {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        )
        with (self._home / "log").open("w") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "-q", "pgbouncer.ini"],
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **identity,
            )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self._process.poll() is None, (self._home / "log").read_text()
            assert time.monotonic() < deadline, "PgBouncer did not start"
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._home)

    def url(self, driver: str) -> str:
        """Return what ``create_engine`` takes to go through it."""
        return f"postgresql+{driver}://postgres@127.0.0.1:{self.port}/{self._database.name}"
