"""The triggers find a message by its key, whatever its type, and by its index once the table has grown."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from tests.models import shared

if TYPE_CHECKING:
    from collections.abc import Sequence


MANY = 30_000


class Words(sa.types.TypeDecorator[Any]):
    impl = postgresql.ARRAY(sa.Text())
    cache_ok = True


KEYS: dict[str, tuple[Any, Sequence[Any]]] = {
    "enum": (lambda: sa.Enum("red", "blue", "green", name="colour"), ["red", "blue", "green"]),
    "domain": (sa.Text, ["a", "b", "c"]),
    "uuid": (sa.Uuid, [uuid.UUID(int=number) for number in range(3)]),
    "array": (lambda: postgresql.ARRAY(sa.Integer()), [[1], [1, 2], [3]]),
    "decorated array": (Words, [["a"], ["a", "b"], ["c"]]),
}


@shared
def make_model(**keys: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    config = QueueConfig(strategy="delete_returning", notify=False)
    columns = {name: mapped_column(type_, primary_key=True, autoincrement=False) for name, type_ in keys.items()}
    return type("Job", (QueueMixin, Base), {"__tablename__": "job", "__queue__": config, **columns})


@pytest.mark.parametrize("kind", KEYS)
def test_a_message_is_found_by_a_key_of_any_type(engine: sa.Engine, kind: str) -> None:
    make_type, (first, second, third) = KEYS[kind]
    model = make_model(key=make_type())
    model.metadata.create_all(engine)
    job, messages = model.__table__, sa.table("sqlaqueue_message_job", sa.column("key", model.__table__.c.key.type))
    with engine.connect() as connection:
        if kind == "domain":
            connection.exec_driver_sql("CREATE DOMAIN code AS text")
            for table in (job, messages):
                connection.exec_driver_sql(f"ALTER TABLE {table.name} ALTER key TYPE code")
        connection.execute(sa.insert(job), [{"key": first}, {"key": second}, {"key": third}])
        connection.execute(sa.delete(job).where(job.c.key == first))
        connection.execute(sa.update(job).where(job.c.key == second).values(status="completed"))
        assert connection.scalars(sa.select(messages.c.key)).all() == [third]


@pytest.mark.parametrize("composite", [False, True], ids=["one column", "two columns"])
@pytest.mark.parametrize("change", ["DELETE FROM job", "UPDATE job SET status = 'processing'"])
def test_a_plan_for_a_small_table_does_not_read_a_large_one(engine: sa.Engine, change: str, *, composite: bool) -> None:
    """A connection keeps the plan of its first call, for which to read one page looks cheaper than an index.

    Compared one by one, these rows would take a hundred times what they may take.
    """
    keys = {"tenant": sa.Integer(), "number": sa.Integer()} if composite else {"number": sa.Integer()}
    model = make_model(**keys)
    model.metadata.create_all(engine)
    columns, values = ("tenant, number", "1, i") if composite else ("number", "i")

    def insert(first: int, last: int) -> str:
        return f"INSERT INTO job ({columns}) SELECT {values} FROM generate_series({first}, {last}) AS i"

    read = sa.text(
        """SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class
           WHERE relname IN ('sqlaqueue_message_job', 'sqlaqueue_message_job_pkey')"""
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        run = connection.exec_driver_sql
        run("ALTER TABLE sqlaqueue_message_job SET (autovacuum_enabled = off)")
        run(insert(1, 2))
        run("VACUUM ANALYZE job")
        run("VACUUM ANALYZE sqlaqueue_message_job")
        run(f"{change} WHERE number = 1")
        run(insert(3, MANY))
        run("SET statement_timeout = '5s'")
        run("BEGIN")
        run(f"{change} WHERE number BETWEEN 3 AND {MANY // 2}")
        # Keys of several columns are joined, by a plan for just so many.
        assert connection.scalar(read) <= (MANY * 2 if composite else MANY // 2)
        run("COMMIT")
        assert connection.scalar(sa.text("SELECT count(*) FROM sqlaqueue_message_job")) == MANY // 2 + 1
