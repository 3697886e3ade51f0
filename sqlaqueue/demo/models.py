"""The jobs of the demo, a row for each file, and their handler: all that an application has to write.

There are three classes because the demo shows three strategies; an application has one class.
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
    """The base of the demo's models, in a schema of its own."""

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
