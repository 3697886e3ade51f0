"""Constructors, generated or not, accept queue attributes."""

import dataclasses
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, registry

from sqlaqueue import QueueConfig, QueueMixin, claim
from sqlaqueue.exc import ConfigurationError
from tests.mapping.tidy import created

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def plain() -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Email(QueueMixin, Base):
        __tablename__ = "email"

        id: Mapped[int] = mapped_column(primary_key=True)
        to: Mapped[str]

    return Email


def dataclass() -> type[Any]:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Email(QueueMixin, Base):
        __tablename__ = "email"

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        to: Mapped[str]

    return Email


def decorated_dataclass() -> type[Any]:
    @registry().mapped_as_dataclass
    class Email(QueueMixin):
        __tablename__ = "email"

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        to: Mapped[str]

    return Email


def sql_model() -> type[Any]:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Email(QueueMixin, Base, table=True):
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        to: str

    return Email


def sql_model_before_mixin() -> type[Any]:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Email(Base, QueueMixin, table=True):
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        to: str

    return Email


ALL = (plain, dataclass, decorated_dataclass, sql_model, sql_model_before_mixin)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_constructors_accept_queue_attributes(make: Any, engine: sa.Engine) -> None:
    model = make()
    with created(engine, model.__table__.metadata), Session(engine) as session:
        given = model(to="a", status="failed", priority=-3, run_at=LATER, attempts=2, max_attempts=9, last_error="x")
        bare = model(to="b")
        session.add_all([given, bare])
        session.commit()
        assert (given.status, given.priority, given.run_at) == ("failed", -3, LATER)
        assert (given.attempts, given.max_attempts, given.last_error) == (2, 9, "x")
        assert (bare.status, bare.priority, bare.attempts) == ("pending", 0, 0)
        assert (bare.max_attempts, bare.last_error, bare.finished_at, bare.lease_token) == (None, None, None, None)
        assert bare.run_at == bare.created_at == session.scalar(sa.select(model.created_at).where(model.to == "a"))
        assert session.execute(claim(model, 5)).scalars().all() == [bare]


def test_queue_attributes_of_a_dataclass_are_keyword_only() -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Email(QueueMixin, Base):
        __tablename__ = "email"
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "email"}

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        kind: Mapped[str] = mapped_column(init=False)
        to: Mapped[str]

    class Newsletter(Email):
        __mapper_args__: ClassVar = {"polymorphic_identity": "newsletter"}

        topic: Mapped[str] = mapped_column(nullable=True)

    letter = Newsletter("a@example.com", "queues", priority=3)
    assert (letter.to, letter.topic, letter.priority, letter.status) == ("a@example.com", "queues", 3, "pending")
    fields = {field.name: field.kw_only for field in dataclasses.fields(Email)}
    assert fields["run_at"]
    assert not fields["to"]


def test_repr_and_eq_of_a_dataclass_include_queue_attributes() -> None:
    model = dataclass()
    assert "priority=4" in repr(model(to="a", priority=4))
    assert model(to="a", priority=4) == model(to="a", priority=4) != model(to="a", priority=5)


def test_a_dataclass_base_before_the_mixin_is_refused() -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"QueueMixin must be the first base, class Email\(QueueMixin, Base\)"):

        class Email(Base, QueueMixin):
            __tablename__ = "email"

            id: Mapped[int] = mapped_column(primary_key=True, init=False)

    assert "email" not in Base.metadata.tables


def test_a_dataclass_base_with_all_attributes_may_precede_the_mixin(engine: sa.Engine) -> None:
    left_out = dict.fromkeys(["max_attempts", "last_error", "created_at", "finished_at"])

    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Email(Base, QueueMixin):
        __tablename__ = "email"
        __queue__ = QueueConfig(
            strategy="batch_select",
            columns={**left_out, "status": "status", "priority": None, "run_at": None, "attempts": None},
        )

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        status: Mapped[str] = mapped_column(default="pending")

    with created(engine, Base.metadata), Session(engine) as session:
        session.add(Email())
        session.commit()
        assert len(session.execute(claim(Email, 5)).scalars().all()) == 1


def test_a_sql_model_reads_and_writes_the_queue_attributes() -> None:
    model = sql_model()
    email = model.model_validate({"to": "a", "run_at": "2100-01-01T00:00:00Z", "priority": 3})
    assert (email.run_at, email.priority) == (LATER, 3)
    assert model(to="a", priority=2).model_dump()["priority"] == 2


def test_merging_a_loaded_instance_records_no_run(engine: sa.Engine) -> None:
    model = plain()
    with created(engine, model.metadata), Session(engine) as one, Session(engine) as other:
        one.add(model(id=1, to="a"))
        one.commit()
        loaded = one.get_one(model, 1)
        assert other.merge(loaded, load=False).to == "a"
