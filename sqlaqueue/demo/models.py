"""The jobs of the demo, a row for each file, and their handler: all that an application has to write.

There are three classes because the demo shows three strategies; an application has one class.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import BigInteger, MetaData, String
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.schema import CreateSchema, DropSchema

from sqlaqueue import Consumer, Fail, JobEvent, QueueConfig, QueueMixin, prepare
from sqlaqueue.embedded_server import EmbeddedServerError, embedded_server
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.sql.engine import sqlstate

SCHEMA = "sqlaqueue_demo"


class Base(DeclarativeBase):
    metadata = MetaData(schema=SCHEMA)


class FileJob(QueueMixin, Base):
    """A file, and the result of reading it."""

    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    # Not text, as a path may contain any bytes.
    path: Mapped[bytes]
    sha256: Mapped[str | None] = mapped_column(String(64))
    size: Mapped[int | None] = mapped_column(BigInteger)
    lines: Mapped[int | None] = mapped_column(BigInteger)
    runs: Mapped[int] = mapped_column(default=0)
    read_by: Mapped[int | None]


class LeasedFile(FileJob):
    """Claimed by a lease: nothing is locked while the file is read."""

    __tablename__ = "leased_file"
    # Short, as the jobs of the killed worker are rescued when their leases expire.
    __queue__ = QueueConfig(strategy="update_status", lease=2)


class MessagedFile(FileJob):
    """Claimed by deleting its message, in the transaction that also stores the result."""

    __tablename__ = "messaged_file"
    __queue__ = QueueConfig(strategy="delete_returning")


class LockedFile(FileJob):
    """Claimed by locking its row, in the transaction that also stores the result."""

    __tablename__ = "locked_file"
    __queue__ = QueueConfig(strategy="batch_select")


MODELS: dict[str, type[FileJob]] = {
    "update_status": LeasedFile,
    "delete_returning": MessagedFile,
    "batch_select": LockedFile,
}


def read_file(session: Session, job: FileJob) -> None:  # noqa: ARG001 - the job is in the session
    """Read the file and store the result: the handler. Its changes commit together with the job's completion."""
    digest, size, lines = hashlib.sha256(), 0, 0
    try:
        with Path(os.fsdecode(job.path)).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
                lines += block.count(b"\n")
    except OSError as error:
        # Another attempt would fail as well.
        raise Fail(str(error)) from error
    job.sha256, job.size, job.lines = digest.hexdigest(), size, lines
    job.read_by = os.getpid()
    # Incremented by the database, so that a second run of the job would be noticed.
    job.runs = type(job).runs + 1


class CannotRunError(Exception):
    """The demo cannot start with these options, on this machine, or with this database."""


# -- database ----------------------------------------------------------------------------------------------------------

_DRIVER = "postgresql+psycopg"
_DUPLICATE_SCHEMA = "42P06"


@contextlib.contextmanager
def demo_database(url: str | None, *, sqlite: bool = False) -> Iterator[sa.Engine]:
    """Yield an engine, of an embedded server without ``url``, with the demo's tables, which are dropped afterwards."""
    if sqlite:
        with tempfile.TemporaryDirectory(prefix="sqlaqueue-demo-") as directory:
            engine = connect(f"sqlite:///{directory}/jobs.db")
            Base.metadata.create_all(engine, tables=[spec_of(LeasedFile).table])
            yield engine
            engine.dispose()
        return
    try:
        sa.make_url(f"{_DRIVER}://").get_dialect().import_dbapi()
    except ModuleNotFoundError:
        raise CannotRunError("the demo needs psycopg: pip install 'sqlaqueue[demo]'") from None
    with contextlib.ExitStack() as stack:
        if url is None:
            # PGOPTIONS, PGSERVICE and the like are meant for another server.
            for name in [name for name in os.environ if name.startswith("PG")]:
                del os.environ[name]
            try:
                url = stack.enter_context(embedded_server())
            except EmbeddedServerError as error:
                raise CannotRunError(f"{error}; for a server of your own there is --url") from None
        engine = sa.create_engine(_with_driver(url))
        stack.callback(engine.dispose)
        stack.enter_context(_schema(engine))
        Base.metadata.create_all(engine)
        yield engine


def connect(url: str) -> sa.Engine:
    """Return an engine for the URL of a database that :func:`demo_database` has made."""
    engine = prepare(sa.create_engine(url))
    if engine.dialect.name != "sqlite":
        return engine
    # A file has no schemas.
    return engine.execution_options(schema_translate_map={SCHEMA: None})


def _with_driver(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError) as error:
        raise CannotRunError(f"--url: {error}; give a URL such as postgresql://user:password@host/database") from None
    if url.drivername not in {"postgresql", "postgres", _DRIVER}:
        raise CannotRunError(
            f"--url: {url.drivername}:// is not supported; give postgresql://, the demo uses psycopg 3"
        )
    # By default drivers wait for a minute or more if the host does not answer.
    return url.set(drivername=_DRIVER, query={"connect_timeout": "10", **url.query})


@contextlib.contextmanager
def _schema(engine: sa.Engine) -> Iterator[None]:
    try:
        with engine.begin() as connection:
            connection.execute(CreateSchema(SCHEMA))
    except DBAPIError as error:
        if sqlstate(error) == _DUPLICATE_SCHEMA:
            msg = (
                f"the database has a schema {SCHEMA}: another demo uses it, or was killed; if none is running, "
                f"DROP SCHEMA {SCHEMA} CASCADE"
            )
        else:
            msg = f"the database cannot be used: {error.orig}"
        raise CannotRunError(msg) from error
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(DropSchema(SCHEMA, cascade=True))


# -- worker ------------------------------------------------------------------------------------------------------------
# A worker process of the demo: ``python -m sqlaqueue.demo.models STRATEGY BATCH``. It runs a Consumer, and prints a
# line for each of its events, from which the demo derives the jobs that it holds.

URL = "SQLAQUEUE_DEMO_URL"
PAUSE_AT = "SQLAQUEUE_DEMO_PAUSE_AT"

resumed = threading.Event()


def handle(session: Session, job: FileJob) -> None:
    """Read the file; before the one in the middle, wait until the demo resumes or kills this worker."""
    if job.path == os.environb[PAUSE_AT.encode()]:
        print_line("paused")
        resumed.wait()
    read_file(session, job)


def print_line(line: str) -> None:
    """Write a line unbuffered, as this process may be killed at any time."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def print_event(event: JobEvent) -> None:
    print_line(f"{event.name} {event.key[0]}")


def read_input(consumer: Consumer[FileJob]) -> None:
    """Resume when a line arrives; stop at the end of the input, when the demo has ended or was killed."""
    while os.read(sys.stdin.fileno(), 80):
        resumed.set()
    resumed.set()
    consumer.stop()


def main() -> None:
    strategy, batch = sys.argv[1:]
    engine = connect(os.environ[URL])
    consumer = Consumer(
        MODELS[strategy], handle, sessionmaker(engine), batch_size=int(batch), poll_interval=0.1, grace=5
    )
    for event in ("claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost"):
        consumer.on(event, print_event)
    threading.Thread(target=read_input, args=[consumer], daemon=True).start()
    print_line("ready")
    consumer.run()
    engine.dispose()


if __name__ == "__main__":
    main()
