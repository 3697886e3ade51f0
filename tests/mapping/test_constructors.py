"""Constructors, generated or not, accept queue attributes; and copies of instances, classes and MetaData."""

import copy
import dataclasses
import pickle
import sys
import types
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, registry

from sqlaqueue import QueueConfig, QueueMixin, claim, complete, extend, release
from sqlaqueue.exc import ConfigurationError, NotClaimedError
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.postgresql.ddl import objects_of
from tests.mapping.conftest import TidyDatabase, created
from tests.mapping.kinds import KINDS
from tests.models import add, new_base
from tests.programs import FORKS

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def of_kind(name: str) -> Any:
    """Return a new class of a kind of the matrix."""
    return KINDS[name].map_class(QueueConfig)


def sql_model_before_mixin() -> type[Any]:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Email(Base, QueueMixin, table=True):
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        payload: str

    return Email


@pytest.mark.parametrize("kind", ["plain", "dataclass", "decorated_dataclass", "sql_model", "sql_model_before_mixin"])
def test_constructors_accept_queue_attributes(kind: str, engine: sa.Engine) -> None:
    model = of_kind(kind) if kind in KINDS else sql_model_before_mixin()
    with created(engine, model.__table__.metadata), Session(engine) as session:
        given = model(
            payload="a", status="failed", priority=-3, run_at=LATER, attempts=2, max_attempts=9, last_error="x"
        )
        bare = model(payload="b")
        session.add_all([given, bare])
        session.commit()
        assert (given.status, given.priority, given.run_at) == ("failed", -3, LATER)
        assert (given.attempts, given.max_attempts, given.last_error) == (2, 9, "x")
        assert (bare.status, bare.priority, bare.attempts) == ("pending", 0, 0)
        assert (bare.max_attempts, bare.last_error, bare.finished_at, bare.lease_token) == (None, None, None, None)
        assert bare.run_at == bare.created_at == session.scalar(sa.select(model.created_at).where(model.payload == "a"))
        assert session.execute(claim(model, 5)).scalars().all() == [bare]


def test_an_insert_leaves_what_is_not_set_to_the_server(engine: sa.Engine) -> None:
    """Its defaults may be others by now, and plain SQL gets the same values."""
    model, statements = of_kind("plain"), []
    with created(engine, model.metadata), Session(engine) as session:
        table = model.__table__.name
        session.execute(sa.text(f"ALTER TABLE {table} ALTER priority SET DEFAULT 7, ALTER max_attempts SET DEFAULT 2"))
        sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        session.add(model(payload="a"))
        session.flush()
        session.execute(sa.text(f"INSERT INTO {table} (payload) VALUES ('a')"))
        assert statements[0].startswith(f"INSERT INTO {table} (payload) VALUES")
        session.add(model(payload="b", max_attempts=None, last_error=None))
        session.flush()
        assert "(payload, max_attempts, last_error)" in statements[2]
        session.expire_all()
        first, plain_sql, third = session.scalars(sa.select(model).order_by(model.id))
        assert (first.status, first.priority, first.attempts, first.max_attempts) == ("pending", 7, 0, 2)
        assert (plain_sql.status, plain_sql.priority, plain_sql.attempts, plain_sql.max_attempts) == (
            "pending",
            7,
            0,
            2,
        )
        assert (third.priority, third.max_attempts) == (7, None)


@pytest.mark.parametrize("kind", ["plain", "dataclass", "sql_model"])
def test_no_attribute_of_the_queue_is_left_to_be_loaded_after_a_flush(kind: str, engine: sa.Engine) -> None:
    """Under asyncio that would fail."""
    model, statements = of_kind(kind), []
    with created(engine, model.__table__.metadata), Session(engine) as session:
        job = model(payload="a")
        session.add(job)
        session.flush()
        sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        assert (job.status, job.priority, job.attempts) == ("pending", 0, 0)
        assert (job.max_attempts, job.last_error, job.finished_at, job.lease_token) == (None, None, None, None)
        assert job.run_at == job.created_at
        assert not statements


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
    model = of_kind("dataclass")
    assert "priority=4" in repr(model(payload="a", priority=4))
    assert model(payload="a", priority=4) == model(payload="a", priority=4) != model(payload="a", priority=5)


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
    model = of_kind("sql_model")
    email = model.model_validate({"payload": "a", "run_at": "2100-01-01T00:00:00Z", "priority": 3})
    assert (email.run_at, email.priority) == (LATER, 3)
    assert model(payload="a", priority=2).model_dump()["priority"] == 2


def test_merging_a_loaded_instance_records_no_run(engine: sa.Engine) -> None:
    model = of_kind("plain")
    with created(engine, model.metadata), Session(engine) as one, Session(engine) as other:
        one.add(model(id=1, payload="a"))
        one.commit()
        loaded = one.get_one(model, 1)
        assert other.merge(loaded, load=False).payload == "a"


# -- copies of claimed instances, by pickle, deepcopy and merge, and of classes and MetaData ---------------------------


class Base(DeclarativeBase):
    pass


class Leased(QueueMixin, Base):
    __tablename__ = "leased"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)


class Locked(QueueMixin, Base):
    __tablename__ = "locked"
    __queue__ = QueueConfig(strategy="batch_select")
    id: Mapped[int] = mapped_column(primary_key=True)


class Announced(QueueMixin, Base):
    __tablename__ = "announced"
    __queue__ = QueueConfig(strategy="delete_returning")
    id: Mapped[int] = mapped_column(primary_key=True)


class Listed(QueueMixin, Base):
    __tablename__ = "listed"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True)
    id: Mapped[int] = mapped_column(primary_key=True)


HELD = [Locked, Announced, Listed]


@pytest.fixture
def engine(engine: sa.Engine) -> Iterator[sa.Engine]:
    with created(engine, Base.metadata):
        add(engine, *(model() for model in (Leased, *HELD) for _ in range(2)))
        yield engine


def complete_in_another_process(url: str, pickled: bytes) -> list[int]:
    engine = sa.create_engine(url)
    try:
        with Session(engine) as session:
            keys = session.scalars(complete(pickle.loads(pickled))).all()  # noqa: S301 - pickled by this test
            session.commit()
            return list(keys)
    finally:
        engine.dispose()


def test_a_pickled_leased_job_can_be_settled_in_another_process(engine: sa.Engine) -> None:
    with Session(engine) as session:
        job = session.scalars(claim(Leased, 1)).one()
        session.commit()
        pickled = pickle.dumps(job)
        url = engine.url.render_as_string(hide_password=False)
        with ProcessPoolExecutor(1, mp_context=FORKS) as pool:
            assert pool.submit(complete_in_another_process, url, pickled).result() == [job.id]
        assert session.scalars(release(job)).all() == []
        session.refresh(job)
        assert job.status == "completed"


@pytest.mark.parametrize("model", HELD)
def test_a_copy_of_a_held_job_cannot_be_settled(engine: sa.Engine, model: Any) -> None:
    with Session(engine) as session:
        (job,) = session.scalars(claim(model, 1)).all()
        key = sa.inspect(job).identity
        for other in (pickle.loads(pickle.dumps(job)), copy.deepcopy(job)):  # noqa: S301 - pickled by this test
            assert (other.id, other.attempts) == (job.id, 1)
            for verb in (complete, release, extend):
                with pytest.raises(NotClaimedError, match=r"is a copy of a claimed instance .* claim the job again"):
                    verb(other)
        assert session.scalars(complete(job)).all() == [*key]
        session.commit()
        session.expunge_all()
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(job))))  # noqa: S301 - pickled by this test
        with pytest.raises(NotClaimedError):
            complete(again)


def test_a_deep_copy_of_a_leased_job_can_be_settled(engine: sa.Engine) -> None:
    with Session(engine) as session:
        job = session.scalars(claim(Leased, 1)).one()
        assert session.scalars(extend(copy.deepcopy(job))).all() == [job.id]
        assert session.scalars(complete(copy.copy(job))).all() == [job.id]
        assert job.status == "completed"


@pytest.mark.parametrize("load", [True, False])
def test_a_merge_keeps_the_run(engine: sa.Engine, load: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    with Session(engine, expire_on_commit=False) as session:
        job = session.scalars(claim(Leased, 1)).one()
        session.commit()
    with Session(engine) as other:
        merged = other.merge(job, load=load)
        assert merged is not job
        assert other.scalars(complete(merged)).all() == [job.id]
        other.commit()
        assert merged.status == "completed"


def test_a_merge_keeps_the_newer_run(engine: sa.Engine) -> None:
    with Session(engine, expire_on_commit=False) as session:
        stale = session.scalars(claim(Leased, 1)).one()
        session.execute(release(stale))
        session.commit()
    with Session(engine) as other:
        job = other.scalars(claim(sa.select(Leased).where(Leased.id == stale.id), 1)).one()
        run = run_of(job)
        assert other.merge(stale) is job
        assert run_of(job) is run


def test_a_merged_held_job_cannot_be_settled_in_another_transaction(engine: sa.Engine) -> None:
    with Session(engine) as session, Session(engine) as other:
        job = session.scalars(claim(Locked, 1)).one()
        merged = other.merge(job)
        with pytest.raises(NotClaimedError, match="the transaction that held"):
            complete(merged)
        assert session.scalars(complete(job)).all() == [job.id]


MODULE = """
class Job(QueueMixin, Base):
    __tablename__ = "job"
    __table_args__ = {"extend_existing": True}
    __queue__ = QueueConfig(strategy=STRATEGY, retention={"failed": 60}, **OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
"""


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning", "own_message"])
def test_a_class_can_be_defined_again_for_the_same_table(tidy: TidyDatabase, strategy: str) -> None:
    """As by reloading a module: with extend_existing=True, no object is attached twice."""
    again = new_base()
    module = types.ModuleType("reloaded")
    options = {"rows_are_messages": True} if strategy == "own_message" else {}
    names = {"QueueMixin": QueueMixin, "QueueConfig": QueueConfig, "Mapped": Mapped, "mapped_column": mapped_column}
    kind = "delete_returning" if strategy == "own_message" else strategy
    vars(module).update(names, Base=again, STRATEGY=kind, OPTIONS=options)
    objects = []
    engine = sa.create_engine(tidy.database.url())
    sys.modules["reloaded"] = module
    try:
        for _ in range(3):
            with warnings.catch_warnings():
                # SQLAlchemy warns that the registry has a class of this name.
                warnings.simplefilter("ignore", sa.exc.SAWarning)
                exec(MODULE, vars(module))  # noqa: S102 - what importlib.reload() does
            with created(engine, again.metadata):
                objects.append(tidy.objects())
                with Session(engine) as session:
                    session.add(module.Job())
                    session.commit()
                    assert len(session.scalars(claim(module.Job, 5)).all()) == 1
    finally:
        del sys.modules["reloaded"]
        engine.dispose()
    assert objects[0] == objects[1] == objects[2]


def test_pickled_metadata_creates_all_objects(tidy: TidyDatabase) -> None:
    again: sa.MetaData = pickle.loads(pickle.dumps(Base.metadata))  # noqa: S301 - pickled by this test
    assert [len(objects_of(table)) for table in again.sorted_tables] == [
        len(objects_of(table)) for table in Base.metadata.sorted_tables
    ]
    engine = sa.create_engine(tidy.database.url())
    with created(engine, Base.metadata):
        objects = tidy.objects()
    with created(engine, again):
        assert tidy.objects() == objects
        with Session(engine) as session:
            session.add(Announced())
            session.commit()
            assert len(session.scalars(claim(Announced, 5)).all()) == 1
    assert tidy.objects() == tidy.empty
    engine.dispose()
