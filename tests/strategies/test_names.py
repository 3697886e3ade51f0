"""Names in the library's statements collide with no name of a program: they begin with ``sqlaqueue_``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.sql.elements import _anonymous_label  # the names that SQLAlchemy makes have no public type
from sqlalchemy.sql.selectable import AliasedReturnsRows

import sqlaqueue as sq
from sqlaqueue import Fair, Limit, Order, QueueConfig, QueueMixin, Rate, Unique, admin
from sqlaqueue.mapping.mixin import spec_of

pytestmark = pytest.mark.once

STRATEGIES = ("update_status", "batch_select", "delete_returning", "rows_are_messages")
FULL: dict[str, Any] = {
    "limits": [Limit(3, per="tenant")],
    "rates": [Rate(100, every=1, per="tenant")],
    "unique": Unique("to"),
    "attempt_history": timedelta(days=1),
    "retention": {"failed": timedelta(days=1)},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {**FULL, "fair": Fair("tenant")},
    "order": {**FULL, "order": Order("tenant", on_failure="continue"), "columns": {"started_at": "started_at"}},
}
FORMER = ("claimed", "picked", "consumed", "expired", "levels", "free", "wanted", "other", "new_rows", "old_rows")
"""Names that statements had, or that stand in functions of the database."""


def make_model(strategy: str, table: str = "job", others: tuple[str, ...] = (), **config: Any) -> Any:
    if strategy == "rows_are_messages":
        strategy, config = "delete_returning", {**config, "rows_are_messages": True}

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = table
        __queue__ = QueueConfig(strategy=strategy, **config)

        id: Mapped[int] = mapped_column(primary_key=True)
        to: Mapped[str] = mapped_column("my_to", default="ada")
        tenant: Mapped[str] = mapped_column("my_tenant", default="one")
        for name in others:
            locals()[f"a_{name}"] = mapped_column(name, sa.Text, default="x")

    return Job


@contextmanager
def statements_of(engine: sa.Engine) -> Iterator[tuple[list[Any], set[str]]]:
    """Collect the statements that are executed, and the names before a dot in their texts."""
    found: list[Any] = []
    anonymous: set[str] = set()

    def keep(_connection: Any, element: Any, *_: Any) -> None:
        found.append(element)

    def read(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        anonymous.update(re.findall(r"\banon_\d+\.", text))

    sa.event.listen(engine, "before_execute", keep)
    sa.event.listen(engine, "before_cursor_execute", read)
    try:
        yield found, anonymous
    finally:
        sa.event.remove(engine, "before_execute", keep)
        sa.event.remove(engine, "before_cursor_execute", read)


def use_everything(model: Any, engine: sa.Engine) -> None:
    """Execute each verb, a Consumer, and what operators call."""

    def handle(session: Session, job: Any) -> None:
        match job.id % 4:
            case 0:
                raise sq.Fail("no such address")
            case 1:
                raise sq.Retry(3600)
            case 2:
                raise sq.Cancel("not wanted")

    sessions = sessionmaker(engine, expire_on_commit=False)
    with sessions() as session:
        session.add_all(model(id=number, to=str(number)) for number in range(1, 13))
        session.commit()
        held = spec_of(model).strategy.holds_transaction and spec_of(model).config.rates
        for verb in () if held else (sq.complete, sq.retry, sq.fail, sq.release, sq.cancel, sq.extend):
            session.execute(verb(session.scalars(sq.claim(model, 2)).all()))
            session.rollback()
        for statement in (sq.rescue(model), sq.purge(model), sq.cancel(sa.select(model).where(model.id == 12))):
            session.execute(statement)
            session.commit()
        if spec_of(model).strategy.name == "delete_returning" and not spec_of(model).config.rows_are_messages:
            session.execute(sq.reconcile(model))
        session.execute(sq.pause(model))
        session.execute(sq.paused(model))
        session.execute(sq.resume(model))
        session.commit()
    consumer: sq.Consumer[Any] = sq.Consumer(model, handle, sessions, poll_interval=0.05)
    consumer.drain()
    with sessions() as session:
        session.execute(sq.requeue(model))
        if spec_of(model).config.unique is not None:
            sq.enqueue(session, model(id=100, to="3"))
        session.commit()
        session.execute(sq.cancel(model))
        session.commit()
        for call in (admin.stats, admin.depth, admin.failures, admin.consumers):
            call(session, model)
        admin.jobs(session, model)
        admin.explain_job(session, model, 3)
        admin.doctor(session, model)
        session.rollback()


def parts_of(element: Any) -> list[Any]:
    """Return an element and what it contains, each once: traversing it would visit what is shared again and again."""
    parts = {id(element): element}
    waiting = [element]
    while waiting:
        for child in waiting.pop().get_children():
            if id(child) not in parts:
                parts[id(child)] = child
                waiting.append(child)
    return list(parts.values())


def collisions(elements: list[Any], table: sa.Table) -> set[str]:
    """Return the names of CTEs, aliases and columns in statements that a program's name may be equal to."""
    found = set()
    known = {*table.c.keys(), *(column.name for column in table.c)}
    for element in elements:
        for rows in parts_of(element):
            # An anonymous one may be no part of the text: its name stands before a dot if it is.
            if not isinstance(rows, AliasedReturnsRows) or isinstance(rows.name, _anonymous_label):
                continue
            if not rows.name.startswith("sqlaqueue_"):
                found.add(f"{type(rows).__name__} {rows.name}")
            names = {column.name for column in rows.c}
            if any(name.startswith("my_") for name in names):
                found |= {f"column {name}" for name in names - known if not name.startswith("sqlaqueue_")}
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_of_ctes_aliases_and_columns_have_the_prefix(engine: sa.Engine, strategy: str, features: str) -> None:
    table = f"sqlaqueue_{strategy}_{features}"
    model = make_model(strategy, table, **FEATURES[features])
    model.metadata.create_all(engine)
    with statements_of(engine) as (elements, anonymous):
        use_everything(model, engine)
    assert len(elements) > 40
    assert collisions(elements, model.__table__) == set()
    assert anonymous == set()


@pytest.mark.each_value
@pytest.mark.parametrize("table", ["claimed", "expired", "new_rows", "é" * 31 + "x"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_table_and_its_columns_may_have_any_name(engine: sa.Engine, strategy: str, table: str) -> None:
    """Even one of 63 bytes, and those that CTEs of the library had."""
    features = FEATURES["full"] if len(table) > 20 else {}
    model = make_model(strategy, table, others=FORMER, **features)
    model.metadata.create_all(engine)
    try:
        use_everything(model, engine)
    finally:
        model.metadata.drop_all(engine)


@pytest.mark.parametrize("table", ["expired", "claimed", "picked"])
def test_jobs_of_a_dead_worker_are_rescued_in_any_table(engine: sa.Engine, table: str) -> None:
    model = make_model("update_status", table)
    model.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(model(id=1))
        session.commit()
        session.scalars(sq.claim(model, 1)).all()
        session.commit()
        session.execute(sa.text(f"UPDATE {table} SET lease_expires_at = now() - interval '1 day'"))
        assert session.scalars(sq.rescue(model)).all() == [1]
        session.commit()
    model.metadata.drop_all(engine)
