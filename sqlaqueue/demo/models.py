"""The jobs of the demo: a row for each file, to be read by some worker. This is all that an application writes.

Three classes, because the demo shows three strategies; an application has one class and names its strategy.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sqlalchemy import BigInteger, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Fail, QueueConfig, QueueMixin

SCHEMA = "sqlaqueue_demo"


class Base(DeclarativeBase):
    """The demo keeps to a schema of its own."""

    metadata = MetaData(schema=SCHEMA)


class FileJob(QueueMixin, Base):
    """A file, and what a worker found in it."""

    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    # Not text: a name may be any bytes.
    path: Mapped[bytes]
    sha256: Mapped[str | None] = mapped_column(String(64))
    size: Mapped[int | None] = mapped_column(BigInteger)
    lines: Mapped[int | None] = mapped_column(BigInteger)
    runs: Mapped[int] = mapped_column(default=0)
    read_by: Mapped[int | None]


class LeasedFile(FileJob):
    """A worker holds it by a lease; nothing is locked while the file is read."""

    __tablename__ = "leased_file"
    # Short, so that the demo is: nobody can tell a dead worker from a busy one before its lease is over.
    __queue__ = QueueConfig(strategy="update_status", lease=2)


class MessagedFile(FileJob):
    """A worker deletes its message, in the transaction that also holds the result."""

    __tablename__ = "messaged_file"
    __queue__ = QueueConfig(strategy="delete_returning")


class LockedFile(FileJob):
    """A worker locks its row, in the transaction that also holds the result."""

    __tablename__ = "locked_file"
    __queue__ = QueueConfig(strategy="batch_select")


MODELS: dict[str, type[FileJob]] = {
    "update_status": LeasedFile,
    "delete_returning": MessagedFile,
    "batch_select": LockedFile,
}


def read_file(session: Session, job: FileJob) -> None:  # noqa: ARG001 - the job is in the session
    """Read the file and store what it holds: the handler. What it writes commits together with the end of its run."""
    digest, size, lines = hashlib.sha256(), 0, 0
    try:
        with Path(os.fsdecode(job.path)).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
                lines += block.count(b"\n")
    except OSError as error:
        # No other attempt will do better, so the job need not wait for one.
        raise Fail(str(error)) from error
    job.sha256, job.size, job.lines = digest.hexdigest(), size, lines
    job.read_by = os.getpid()
    # Counted by the database and not in this process: a second run of the same job would show.
    job.runs = type(job).runs + 1
