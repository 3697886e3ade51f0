"""Partition keys of queue tables: what is refused when the class is mapped, and what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique
from sqlaqueue.exc import ConfigurationError

if TYPE_CHECKING:
    from tests.servers import Database


def make(partition_by: str, *, key: tuple[str, ...] = ("id", "tenant", "created_at"), **options: Any) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    def column(name: str, kind: Any, **more: Any) -> Any:
        return mapped_column(name, kind, primary_key=name in key, **more)

    body = {
        "__tablename__": "job",
        "__table_args__": {"postgresql_partition_by": partition_by},
        "__queue__": QueueConfig(columns={"created_at": "created_at"}, **options),
        "id": column("id", sa.BigInteger, autoincrement=False),
        "tenant": column("tenant", sa.Text),
        "Day": column("Day", sa.Date),
        "kind": column("kind", sa.Text),
        "created_at": column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now()),
    }
    if not key:
        body["__mapper_args__"] = {"primary_key": [body["id"].column]}
    return type("Job", (QueueMixin, Base), body)


@pytest.mark.parametrize(
    ("partition_by", "options"),
    [
        ("RANGE (created_at)", {}),
        ("range(Tenant, Created_At)", {}),
        ('HASH (tenant text_ops, "id")', {}),
        ("LIST (tenant)", {"unique": Unique("kind", "tenant"), "key": ("id", "tenant")}),
        ('LIST (tenant COLLATE "C")', {"key": ()}),
        ("RANGE (date_trunc('day', created_at AT TIME ZONE 'UTC'), tenant)", {"key": ()}),
        ("RANGE (created_at)", {"key": ()}),
    ],
)
def test_accepted_here_and_by_the_server(database: Database, partition_by: str, options: Any) -> None:
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    make(partition_by, **options).metadata.create_all(engine)


@pytest.mark.parametrize(
    ("partition_by", "options", "message"),
    [
        ("RANGE (run_at)", {"key": ()}, r"Job.run_at is the run_at of the queue, which changes .* the created_at$"),
        ("LIST (status)", {"key": ()}, "Job.status is the status of the queue, which changes while a job is in it"),
        ("HASH (id, kind)", {}, r"the primary key .* lacks Job.kind; declare primary_key=True there as well"),
        ('RANGE ("Day", tenant)', {"key": ("id",)}, r"lacks Job.Day, Job.tenant;"),
        ("LIST (day)", {}, "the table job has no column 'day'"),
        ("LIST (tenants)", {}, "has no column 'tenants'; did you mean 'tenant'"),
        (
            "RANGE (tenant, extract(year FROM created_at))",
            {},
            "the partition key has an expression, and PostgreSQL then allows no primary key; partition by columns",
        ),
        ("RANGE ((created_at::date))", {"key": (), "unique": Unique("kind")}, r"allows no QueueConfig\(unique=...\)"),
        (
            "RANGE (created_at)",
            {"unique": Unique("kind")},
            r"unique=Unique\('kind', ...\)\): .* add Job.created_at, if jobs may be equal otherwise, or partition by",
        ),
        # The index has the number of the period, not the column.
        ("RANGE (created_at)", {"unique": Unique("kind", per=3600)}, "add Job.created_at"),
    ],
)
def test_refused(partition_by: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        make(partition_by, **options)
    assert str(refused.value).startswith(f"Job: postgresql_partition_by={partition_by!r}: ")
