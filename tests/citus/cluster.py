"""A Citus cluster on this machine: a coordinator and two workers.

``python -m tests.citus.cluster BIN_DIR`` starts one, prints the URL of a database with Citus, and removes it all when
it is interrupted. ``BIN_DIR`` has the programs of a PostgreSQL for which Citus was built.
``docs/evidence/engines.md`` says how to build it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import sql

from tests.servers import SETTINGS, Driver, Server, fast_directory, give_away

CITUS_SETTINGS = (
    SETTINGS
    + """
shared_preload_libraries = 'citus'
wal_level = logical
ssl = off
citus.node_conninfo = 'sslmode=disable'
citus.local_hostname = '{socket_directory}'
citus.enable_statistics_collection = off
citus.recover_2pc_interval = 1s
citus.shard_count = 8
"""
)

EXTENSION = "CREATE EXTENSION citus"


@dataclass(frozen=True)
class CitusDatabase:
    """One database, by one node of a cluster."""

    address: sa.URL

    @classmethod
    def of_url(cls, url: str) -> CitusDatabase:
        """Return the database that a URL names."""
        return cls(sa.make_url(url))

    def url(self, driver: Driver = "psycopg") -> str:
        return self.address.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)

    @property
    def dsn(self) -> str:
        return self.address.set(drivername="postgresql").render_as_string(hide_password=False)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.dsn, autocommit=True)

    def in_schema(self, name: str) -> CitusDatabase:
        """Return the same with a search path to a schema."""
        return CitusDatabase(self.address.update_query_dict({"options": f"-csearch_path={name}"}))

    @property
    def schema(self) -> str:
        """The schema of :meth:`in_schema`."""
        return str(self.address.query["options"]).partition("=")[2]

    def on_node(self, host: str, port: int) -> CitusDatabase:
        """Return the same on another node."""
        if host.startswith("/"):
            return CitusDatabase(self.address.update_query_dict({"host": host, "port": str(port)}))
        return CitusDatabase(self.address.set(host=host, port=port))

    def nodes(self) -> list[CitusDatabase]:
        """Return the same on each worker."""
        with self.connect() as connection:
            found = connection.execute("SELECT nodename, nodeport FROM pg_dist_node WHERE groupid > 0 ORDER BY nodeid")
            return [self.on_node(host, port) for host, port in found]

    def node_of(self, table: str) -> CitusDatabase:
        """Return the same on the worker that has a table of a distributed schema."""
        query = "SELECT nodename, nodeport FROM citus_shards WHERE table_name = %s::regclass"
        with self.connect() as connection:
            row = connection.execute(query, [table]).fetchone()
        assert row is not None, f"{table} is not on a worker"
        return self.on_node(*row)


@dataclass(frozen=True)
class Cluster:
    """The servers of a cluster; the first of them is the coordinator."""

    servers: tuple[Server, ...]

    @property
    def coordinator(self) -> Server:
        return self.servers[0]

    @property
    def workers(self) -> tuple[Server, ...]:
        return self.servers[1:]

    @contextlib.contextmanager
    def database(self) -> Iterator[CitusDatabase]:
        """Create a database on all nodes; in the end drop it."""
        name = f"test_{secrets.token_hex(6)}"
        for server in self.servers:
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                connection.execute("SET citus.enable_create_database_propagation = off")
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            with psycopg.connect(server.dsn(name), autocommit=True) as connection:
                connection.execute(EXTENSION)
        with psycopg.connect(self.coordinator.dsn(name), autocommit=True) as connection:
            host = str(self.coordinator.directory)
            connection.execute("SELECT citus_set_coordinator_host(%s, 5432)", [host])
            for worker in self.workers:
                connection.execute("SELECT citus_add_node(%s, 5432)", [str(worker.directory)])
        try:
            yield CitusDatabase.of_url(self.coordinator.url("psycopg", name))
        finally:
            for server in self.servers:
                with psycopg.connect(server.dsn(), autocommit=True) as connection:
                    connection.execute("SET citus.enable_create_database_propagation = off")
                    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
                    connection.execute(drop)


@contextlib.contextmanager
def running(bin_directory: Path) -> Iterator[Cluster]:
    """Start a coordinator and two workers; the reaper of :mod:`tests.servers` stops them when this process ends."""
    home = Path(tempfile.mkdtemp(prefix="citus-", dir=fast_directory()))
    give_away(home)
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.servers", home],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        version = major_version(bin_directory)
        names = ("coordinator", "worker1", "worker2")
        yield Cluster(tuple(Server(version, bin_directory, home / name).create(CITUS_SETTINGS) for name in names))
    finally:
        reaper.communicate()


def major_version(bin_directory: Path) -> int:
    """Return the major version of the server in a directory."""
    printed = subprocess.check_output([bin_directory / "postgres", "--version"], text=True)
    return int(printed.split("(PostgreSQL) ")[1].split(".")[0])


def kill(server: Server) -> None:
    """Kill the processes of a server with SIGKILL, as if its machine had lost power."""
    lines = (server.data / "postmaster.pid").read_text().splitlines()
    os.kill(int(lines[0]), signal.SIGKILL)
    # The others notice that their parent is gone, and leave the shared memory; a new server waits for that.
    time.sleep(0.1)


def main() -> None:
    """Run a cluster until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running(Path(sys.argv[1])) as cluster, cluster.database() as database, contextlib.suppress(KeyboardInterrupt):
        print(database.url(), flush=True)  # noqa: T201 - the output of a command
        signal.pause()


if __name__ == "__main__":
    main()
