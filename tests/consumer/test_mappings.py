"""Handlers get instances with everything that their mapping loads: async code cannot load it later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column, relationship, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, QueueConfig, QueueMixin
from tests.consumer.models import models

if TYPE_CHECKING:
    from tests.servers import Database


def mapped(strategy: str) -> tuple[Any, Any, dict[Any, str]]:
    """Return a base, a class that jobs refer to, and classes of jobs with what a claim by itself leaves out of each."""

    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "owner"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        boss_id: Mapped[int | None] = mapped_column(sa.ForeignKey("owner.id"))
        boss: Mapped[Owner | None] = relationship(lazy="joined", join_depth=2, remote_side="Owner.id")

    class Task(QueueMixin, Base):
        __abstract__ = True
        __queue__ = QueueConfig(strategy=strategy)
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Owner.id), default=1)

    class Joined(Task):
        __tablename__ = "joined"
        owner: Mapped[Owner] = relationship(lazy="joined")

    class Subquery(Task):
        __tablename__ = "subquery"
        owner: Mapped[Owner] = relationship(lazy="subquery")

    class Computed(Task):
        __tablename__ = "computed"
        owner_name: Mapped[str] = column_property(sa.func.concat("the ", "owner", type_=sa.Text()))

    class AnyTask(Task):
        __tablename__ = "any"
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "any", "with_polymorphic": "*"}  # noqa: RUF012 - as declarative has it

    class OfAny(AnyTask):
        __tablename__ = "of_any"
        id: Mapped[int] = mapped_column(sa.ForeignKey(AnyTask.id), primary_key=True)
        to: Mapped[str] = mapped_column(default="its own")
        __mapper_args__ = {"polymorphic_identity": "of any"}  # noqa: RUF012 - as declarative has it

    class Some(Task):
        __tablename__ = "some"
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "some"}  # noqa: RUF012 - as declarative has it

    class OfSome(Some):
        __tablename__ = "of_some"
        id: Mapped[int] = mapped_column(sa.ForeignKey(Some.id), primary_key=True)
        friend_id: Mapped[int] = mapped_column(sa.ForeignKey(Owner.id), default=2)
        friend: Mapped[Owner] = relationship(lazy="joined")
        __mapper_args__ = {"polymorphic_identity": "of some", "polymorphic_load": "inline"}  # noqa: RUF012 - as declarative has it

    return Base, Owner, {Joined: "owner", Subquery: "owner", Computed: "owner_name", OfAny: "to", OfSome: "friend"}


def test_everything_that_the_mapping_loads_is_there(database: Database, strategy: str, api: str) -> None:
    base, owner, kinds = mapped(strategy)
    engine = sa.create_engine(database.url())
    base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([owner(id=2, name="the boss"), owner(id=1, name="the owner", boss_id=2)])
        session.commit()
        session.add_all([kind() for kind in kinds for _ in range(3)])
        session.commit()
    seen: list[tuple[Any, int]] = []

    def note(_: Any, job: Any) -> None:
        value = vars(job)[kinds[type(job)]]
        seen.append((type(job), job.id))
        assert value in {"the owner", "its own"} or value.name == "the boss" or vars(value)["boss"].name == "the boss"
        assert job.status == "processing", "what the claim has shown is not read again"

    async def note_async(session: Any, job: Any) -> None:
        note(session, job)

    async def drain_async() -> None:
        async_engine = create_async_engine(database.url("asyncpg"))
        for kind in kinds:
            model: Any = sa.inspect(kind).base_mapper.class_
            assert await AsyncConsumer(model, note_async, async_sessionmaker(async_engine)).drain() == 3
        await async_engine.dispose()

    if api == "async":
        asyncio.run(drain_async())
    for kind in kinds if api == "sync" else ():
        assert Consumer(sa.inspect(kind).base_mapper.class_, note, sessionmaker(engine)).drain() == 3
    with engine.connect() as connection:
        ended = [
            row.status
            for kind in kinds
            for row in connection.execute(sa.select(kind.__mapper__.base_mapper.local_table))
        ]
    engine.dispose()
    assert seen == [(kind, number) for kind in kinds for number in (1, 2, 3)]
    assert set(ended) == {"completed"}


@pytest.mark.once
def test_a_claim_that_returns_everything_is_not_followed_by_a_select() -> None:
    """Lazy relationships, and those that are loaded by a SELECT of their own, do not need one."""
    assert (
        Consumer(models("update_status").job, lambda session, job: None, sessionmaker())._parts.statements.load_rest
        is None
    )
