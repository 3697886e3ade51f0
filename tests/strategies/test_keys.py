"""The keys of a batch are one parameter, whatever their type."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, complete, release
from sqlaqueue.mapping.mixin import spec_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.servers import Database

DRIVERS = ("psycopg", "asyncpg", "psycopg2")


class Doubled(sa.types.TypeDecorator[int]):
    """A number that is another one in the database."""

    impl = sa.Integer
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else 2 * value

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else value // 2


KEYS: dict[str, tuple[Any, Sequence[Any]]] = {
    "smallint": (sa.SmallInteger, [-3, 0, 7]),
    "bigint": (sa.BigInteger, [-(2**40), 1, 2**60]),
    "uuid": (sa.Uuid, [uuid.UUID(int=number) for number in (0, 5, 2**127)]),
    "uuid as text": (lambda: sa.Uuid(as_uuid=False), [str(uuid.UUID(int=number)) for number in (0, 5, 2**127)]),
    "text": (sa.Text, ["a,b", '{"c"}', "NULL"]),
    "decorated": (Doubled, [1, 2, 4]),
}


def make_model(type_: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    config = QueueConfig(strategy="update_status")
    key = mapped_column(type_(), primary_key=True, autoincrement=False)
    return type("Job", (QueueMixin, Base), {"__tablename__": "job", "__queue__": config, "key": key})


def settle_some(session: Session, model: Any, keys: Sequence[Any]) -> list[Any]:
    """Claim all, complete two and release one; return what the statements returned."""
    session.add_all([model(key=key) for key in keys])
    session.commit()
    first, *others = sorted(session.scalars(claim(model, 10)), key=lambda job: keys.index(job.key))
    returned = [*session.scalars(complete(others)), *session.scalars(release(first))]
    session.commit()
    return returned


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_runs_end_by_keys_of_any_type(database: Database, driver: str, kind: str) -> None:
    type_, keys = KEYS[kind]
    model = make_model(type_)
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    model.metadata.create_all(engine)

    async def settle_in_async_code() -> list[Any]:
        async_engine = create_async_engine(database.url(driver), poolclass=sa.NullPool)
        async with AsyncSession(async_engine) as session:
            return await session.run_sync(settle_some, model, keys)

    if driver == "asyncpg":
        returned = asyncio.run(settle_in_async_code())
    else:
        with Session(sa.create_engine(database.url(driver), poolclass=sa.NullPool)) as session:
            returned = settle_some(session, model, keys)
    assert sorted(returned, key=keys.index) == [*keys]
    with Session(engine) as session:
        states = {job.key: job.status for job in session.scalars(sa.select(model))}
    assert states == {keys[0]: "pending", keys[1]: "completed", keys[2]: "completed"}


@pytest.mark.parametrize("given", ["2", 2])
def test_a_number_can_be_given_as_text(engine: sa.Engine, given: Any) -> None:
    model = make_model(sa.Integer)
    model.metadata.create_all(engine)
    spec = spec_of(model)
    with Session(engine) as session:
        session.add_all([model(key=number) for number in range(1, 4)])
        session.flush()
        assert session.scalars(sa.select(model.key).where(spec.key_in(spec.keys, [(given,)]))).all() == [2]


@pytest.mark.parametrize("given", ["1,2", "1}", "", None])
def test_a_value_that_is_no_number_matches_no_job(engine: sa.Engine, given: Any) -> None:
    """It matches no job at all, and raises no error."""
    model = make_model(sa.Integer)
    model.metadata.create_all(engine)
    spec = spec_of(model)
    with Session(engine) as session, pytest.raises(StatementError):
        session.scalars(sa.select(model.key).where(spec.key_in(spec.keys, [(given,)])))


@pytest.mark.parametrize("given", ["00000000-0000-0000-0000-000000000001", uuid.UUID(int=1)])
def test_a_uuid_can_be_given_as_text(engine: sa.Engine, given: Any) -> None:
    model = make_model(sa.Uuid)
    model.metadata.create_all(engine)
    spec = spec_of(model)
    with Session(engine) as session:
        session.add_all([model(key=uuid.UUID(int=number)) for number in range(3)])
        session.flush()
        found = session.scalars(sa.select(model.key).where(spec.key_in(spec.keys, [(given,)]))).all()
        assert found == [uuid.UUID(int=1)]
