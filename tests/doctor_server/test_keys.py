"""Integer keys that run out, of jobs and of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.admin.doctor.vacuum import check_keys
from tests.doctor_server.examine import apply, codes, find
from tests.unique.models import KINDS, create, make_job

if TYPE_CHECKING:
    from tests.servers import Database

CHECK = [check_keys]
INTEGER = 2**31 - 1


def set_value(database: Database, table: str, value: int) -> None:
    with database.connect() as connection:
        connection.execute(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {value})".encode())


def insert(database: Database) -> int:
    """Insert a job; the model's own type for the key is still the old one."""
    with database.connect() as connection:
        row = connection.execute("INSERT INTO job DEFAULT VALUES RETURNING id").fetchone()
    assert row is not None
    key: int = row[0]
    return key


@pytest.mark.parametrize("kind", KINDS)
def test_a_serial_key(database: Database, engine: sa.Engine, kind: str) -> None:
    job = make_job(kind, unique=None)
    create(engine, job)
    set_value(database, "job", int(INTEGER * 0.69))
    assert codes(engine, [job], CHECK) == []
    set_value(database, "job", int(INTEGER * 0.75))
    assert find("keys_run_out", engine, [job], CHECK).severity == "warning"
    set_value(database, "job", INTEGER)
    finding = find("keys_run_out", engine, [job], CHECK)
    assert finding.severity == "critical"
    assert "public.job_id_seq of public.job.id, a column of type integer" in finding.summary
    assert finding.facts["used"] == 1.0
    with pytest.raises(psycopg.errors.SequenceGeneratorLimitExceeded):
        insert(database)
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECK) == []
    assert insert(database) > INTEGER


def test_the_key_of_messages(database: Database, engine: sa.Engine) -> None:
    job = make_job("existing_messages", unique=None)
    create(engine, job)
    set_value(database, "message", INTEGER)
    finding = find("keys_run_out", engine, [job], CHECK)
    assert "public.message.id" in finding.summary
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECK) == []


def make_keys(*column: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(*column, primary_key=True)

    class Child(Base):
        __tablename__ = "Child"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column("Job", sa.ForeignKey("job.id"))

    return Job


@pytest.mark.parametrize(
    ("column", "last", "fix"),
    [
        ((sa.SmallInteger, sa.Identity()), 32_767, 'ALTER TABLE public."Child" ALTER COLUMN "Job" TYPE bigint;'),
        ((sa.Integer, sa.Identity()), INTEGER, "ALTER TABLE public.job ALTER COLUMN id TYPE bigint;"),
        ((sa.Integer, sa.Sequence("numbers")), INTEGER, "ALTER TABLE public.job ALTER COLUMN id TYPE bigint;"),
        ((sa.BigInteger, sa.Sequence("numbers", maxvalue=1000)), 1000, "ALTER SEQUENCE public.numbers AS bigint"),
        ((sa.BigInteger, sa.Identity(maxvalue=1000)), 1000, "ALTER SEQUENCE public.job_id_seq AS bigint"),
    ],
    ids=["smallint", "identity", "bigint sequence", "short sequence", "short identity"],
)
def test_other_keys(database: Database, engine: sa.Engine, column: Any, last: int, fix: str) -> None:
    job = make_keys(*column)
    create(engine, job)
    named = isinstance(column[1], sa.Sequence)
    with database.connect() as connection:
        if named:
            connection.execute("ALTER TABLE job ALTER COLUMN id SET DEFAULT nextval('numbers')")
            connection.execute(f"SELECT setval('numbers', {last})".encode())
    if not named:
        set_value(database, "job", last)
    finding = find("keys_run_out", engine, [job], CHECK)
    assert (finding.facts["last"], finding.facts["limit"]) == (last, last)
    assert fix in finding.fixes[0]
    # In the text, as a comment in the fix is read too late.
    assert ("columns of the model to BigInteger before" in finding.consequence) == (column[0] is not sa.BigInteger)
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECK) == []
    assert insert(database) == last + 1
    with database.connect() as connection:
        connection.execute(f'INSERT INTO "Child" ("Job") VALUES ({last + 1})'.encode())


def test_a_bigint_key_has_no_fix(database: Database, engine: sa.Engine) -> None:
    job = make_keys(sa.BigInteger)
    create(engine, job)
    set_value(database, "job", 2**63 - 1)
    assert find("keys_run_out", engine, [job], CHECK).fixes == ()


def test_a_key_without_a_sequence(engine: sa.Engine) -> None:
    job = make_keys(sa.Uuid)
    job.metadata.remove(job.metadata.tables["Child"])
    create(engine, job)
    assert codes(engine, [job], CHECK) == []
