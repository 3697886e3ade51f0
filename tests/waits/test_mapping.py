"""What a class with ``waits_for`` gets when mappers are configured, and what is refused, each with the reason."""

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, relationship
from sqlmodel import Field, Relationship, SQLModel

from sqlaqueue import QueueConfig, QueueMixin, States, Unique, WaitFor, claim, complete
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.models import new_base
from tests.servers import Database
from tests.waits.models import job_class, make_dependent, make_tree

Make = Callable[..., type[Any]]


def classes(
    waits: Any = "rows",
    *,
    row: Mapping[str, Any] | None = MappingProxyType({}),
    key: Any = None,
    rows: Callable[[], Any] = lambda: relationship("Row"),
    base: Any = None,
    attributes: Mapping[str, Any] | None = None,
    **config: Any,
) -> tuple[type[Any], type[Any]]:
    """Return the classes Batch and Row, whose mappers are not configured yet.

    :param row: the options of the queue of rows; None if they are no jobs.
    """
    base = base or new_base()
    identity = {"id": mapped_column(sa.Integer, primary_key=True)}
    batch = job_class(base, "Batch", identity | {"rows": rows()} | dict(attributes or {}), waits_for=waits, **config)
    columns = {
        "id": mapped_column(sa.Integer, primary_key=True),
        "batch_id": mapped_column(key if key is not None else sa.ForeignKey("batch.id")),
    }
    if row is None:
        return batch, type("Row", (base,), {"__module__": __name__, "__tablename__": "row", **columns})
    return batch, job_class(base, "Row", columns, **row)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"waits": "row"}, r"waits_for='row'\): there is no such relationship; did you mean 'rows'"),
        ({"waits": "id"}, "Batch.id is no relationship"),
        ({"row": None}, "Row is no queue; let it inherit"),
        ({"rows": lambda: relationship("Row", viewonly=True)}, "viewonly"),
        (
            {"rows": lambda: relationship("Row", primaryjoin="and_(Batch.id == Row.batch_id, Row.id > 3)")},
            "further conditions",
        ),
        (
            {
                "key": sa.ForeignKey("batch.id"),
                "rows": lambda: relationship("Row", primaryjoin="foreign(Row.id) == Batch.id"),
            },
            "no foreign key",
        ),
        (
            {"row": {"strategy": "delete_returning", "rows_are_messages": True}},
            "cannot be distinguished; leave rows_are_messages out of Row",
        ),
        ({"row": {"states": States(completed=None)}}, "no status value for completed jobs"),
        (
            {"waits": WaitFor("rows", on_failure="block"), "row": {"states": States(failed=None)}},
            "no status value for failed jobs",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_it_cannot_follow_is_refused(options: dict[str, Any], reason: str) -> None:
    batch, _ = classes(**options)
    with pytest.raises(ConfigurationError, match=reason):
        batch.registry.configure()


def test_many_to_many_is_refused() -> None:
    base = new_base()
    pairs = sa.Table(
        "pair", base.metadata, sa.Column("a", sa.ForeignKey("batch.id")), sa.Column("b", sa.ForeignKey("row.id"))
    )
    batch, _ = classes(rows=lambda: relationship("Row", secondary=pairs), base=base)
    with pytest.raises(ConfigurationError, match="goes through the table pair"):
        batch.registry.configure()


def test_a_parent_that_deletes_its_row_is_refused() -> None:
    _, child = make_dependent(parents={"on_complete": "delete"})
    with pytest.raises(ConfigurationError, match='Parent has on_complete="delete"'):
        child.registry.configure()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"waits": 5}, r"waits_for=5\): name a relationship"),
        ({"waits": ("rows", WaitFor("rows"))}, "'rows' is named twice"),
        ({"strategy": "delete_returning", "rows_are_messages": True}, "a job that waits has a status"),
        ({"states": States(waiting=None)}, "needs a status value for waiting jobs"),
        ({"states": States(cancelled=None)}, "needs a status value for cancelled jobs"),
        ({"states": States(pending=0, processing=1, completed=2, failed=3, cancelled=4)}, "cannot hold 'waiting'"),
        ({"columns": {"waits_for_count": None}}, "needs the queue attribute 'waits_for_count'"),
        ({"waits": (), "extra_columns": ("is_open",)}, "only a batch can be open"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_config_that_contradicts_itself_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        classes(**config)


def test_wrong_arguments_of_wait_for_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'use the name of a relationship, as in WaitFor\("rows"\)'):
        WaitFor(5)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ConfigurationError, match="a waiting job counts as a pending one"):
        Unique("id", states=("waiting", "pending"))
    with pytest.raises(ConfigurationError, match='use "block", "continue" or "cancel"'):
        WaitFor("rows", on_failure="stop")  # type: ignore[arg-type]  # what is tested


def test_messages_of_the_application_are_refused() -> None:
    base = new_base()
    messages = sa.Table("message", base.metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("job_id"))
    strategy = ExistingMessages(messages, job="job_id")
    with pytest.raises(ConfigurationError, match="nobody would insert that of a job which has waited"):
        classes(base=base, strategy=strategy, columns={"priority": None})


def test_only_a_batch_can_be_open() -> None:
    node = make_tree(to_many=False, extra_columns=("is_open",))
    with pytest.raises(ConfigurationError, match="none of waits_for leads to many jobs"):
        node.registry.configure()


def test_a_plain_queue_has_no_state_and_no_table_of_it() -> None:
    _, row = classes()
    row.registry.configure()
    assert spec_of(row).config.states.waiting is None
    assert {*spec_of(row).side_tables} == {"sqlaqueue_control", "sqlaqueue_consumer"}


def test_a_status_that_is_called_waiting_stays_pending() -> None:
    states = States(pending="waiting")
    assert (states.pending, states.waiting) == ("waiting", None)


def test_an_index_of_the_foreign_key_is_added_unless_there_is_one() -> None:
    for given, added in ((sa.ForeignKey("batch.id"), 1), (None, 0)):
        batch, row = classes(key=given, rows=lambda: relationship("Row"), base=new_base()) if added else _indexed()
        batch.registry.configure()
        names = [index.name for index in row.__table__.indexes if [each.name for each in index.columns] == ["batch_id"]]
        assert len(names) == 1, names
        assert ("waits_rows" in str(names[0])) is bool(added)


def _indexed() -> tuple[type[Any], type[Any]]:
    base = new_base()
    batch, row = classes(base=base)
    sa.Index("mine", row.__table__.c.batch_id)
    return batch, row


# -- kinds of classes --------------------------------------------------------------------------------------------------


class Phase(Enum):
    WAITING, PENDING, PROCESSING, COMPLETED, FAILED, CANCELLED = range(6)


def of_dataclasses() -> tuple[type[Any], type[Any]]:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Batch(QueueMixin, Base):
        __tablename__ = "batch"
        __queue__ = QueueConfig(waits_for=WaitFor("rows", on_failure="cancel"), extra_columns=("is_open",))
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        rows: Mapped[list["Row"]] = relationship(default_factory=list)

    class Row(QueueMixin, Base):
        __tablename__ = "row"
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        batch_id: Mapped[int | None] = mapped_column(sa.ForeignKey("batch.id"), init=False)

    return Batch, Row


def of_sqlmodel() -> tuple[type[Any], type[Any]]:
    class Base(SQLModel, registry=sa.orm.registry()):
        pass

    class Batch(QueueMixin, Base, table=True):
        __tablename__ = "batch"
        __queue__ = QueueConfig(waits_for="rows")
        id: int | None = Field(default=None, primary_key=True)
        rows: list["Row"] = Relationship()

    class Row(QueueMixin, Base, table=True):
        __tablename__ = "row"
        id: int | None = Field(default=None, primary_key=True)
        batch_id: int | None = Field(default=None, foreign_key="batch.id")

    Batch.update_forward_refs(Row=Row) if not hasattr(Batch, "model_rebuild") else Batch.model_rebuild()
    return Batch, Row


KINDS: dict[str, Make] = {
    "plain": classes,
    "dataclasses": of_dataclasses,
    "sqlmodel": of_sqlmodel,
    "enum": lambda: classes(states=States(**{each.name.lower(): each for each in Phase})),
    "numbers": lambda: classes(states=States(pending=0, processing=1, completed=2, failed=3, cancelled=4, waiting=5)),
    "renamed": lambda: classes(columns={"waits_for_count": "left", "status": "phase"}),
    "a column of its own": lambda: classes(
        columns={"waits_for_count": "left"}, attributes={"left": mapped_column(sa.Integer)}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_classes(database: Database, kind: str) -> None:
    batch, row = KINDS[kind]()
    engine = sa.create_engine(database.url())
    batch.metadata.create_all(engine)
    states, status = spec_of(batch).config.states, spec_of(batch).attributes["status"]
    with Session(engine) as session:
        job, empty = batch(), batch()
        job.rows = [row(), row()]
        session.add_all([job, empty])
        session.commit()
        assert getattr(job, status) == states.waiting
        assert getattr(empty, status) == states.pending
        session.execute(complete(session.scalars(claim(row, 5)).all()))
        session.commit()
        session.refresh(job)
        assert getattr(job, status) == states.pending
    engine.dispose()


def test_a_table_that_is_created_alone_has_its_triggers(database: Database) -> None:
    batch, row = classes()
    engine = sa.create_engine(database.url())
    batch.__table__.create(engine)
    row.__table__.create(engine)
    spec_of(batch).side_tables["waits"].create(engine)
    triggers = sa.text("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'sqlaqueue_waits%'")
    with engine.connect() as connection:
        assert connection.scalar(triggers) == 8
    engine.dispose()
