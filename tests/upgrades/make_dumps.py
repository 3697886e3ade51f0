"""Write the databases of 0.1.0 into ``dumps/``: ``python -m tests.upgrades.make_dumps LIBRARY``.

LIBRARY is the directory of the unpacked wheel of 0.1.0, which the tests leave in ``build/upgrades``. The dumps are the
databases from which each later version is upgraded: they are never written again.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import servers
from tests.mariadb.server import MariaDBServer

HERE = Path(__file__).parent
DUMPS = HERE / "dumps"
_SETTINGS = ("SET ", "\\", "--", "/*!40", "LOCK TABLES", "UNLOCK TABLES")
"""The lines about the session and the program that has written a dump, which another version of the server refuses."""


def fill(url: str, library: str) -> None:
    environment = {**os.environ, "SQLAQUEUE_URL": url, "PYTHONPATH": f"{library}{os.pathsep}{HERE}"}
    command = [sys.executable, "-P", "-c", "import program; program.main()", "fill"]
    subprocess.run(command, env=environment, check=True)


def write(name: str, text: str) -> None:
    kept = [line for line in text.splitlines() if line and not line.startswith(_SETTINGS)]
    (DUMPS / f"{name}.sql").write_text("\n".join(kept) + "\n")


def main() -> None:
    library = sys.argv[1]
    DUMPS.mkdir(exist_ok=True)
    version = min(servers.find_installations())
    with servers.running([version]) as running, running.shared(version).database() as database:
        fill(database.url(), library)
        options = ["--inserts", "--no-owner", "--no-privileges", "--dbname", database.dsn]
        write("postgresql", subprocess.check_output([database.server.bin_directory / "pg_dump", *options], text=True))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "jobs.db")
        fill(f"sqlite:///{path}", library)
        connection = sqlite3.connect(path)
        write("sqlite", "\n".join(connection.iterdump()))
        connection.close()
        home = Path(directory, "mariadb")
        home.mkdir()
        with MariaDBServer(home, Path(directory, "template")) as server, server.database() as name:
            fill(server.url(name), library)
            options = ["--hex-blob", "--skip-extended-insert", "--skip-comments", "--skip-add-drop-table"]
            command = ["/usr/bin/env", "mariadb-dump", f"--socket={server.socket}", "--user=root", *options, name]
            write("mariadb", subprocess.check_output(command, text=True))


if __name__ == "__main__":
    main()
