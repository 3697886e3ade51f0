"""What a claim loads: columns, and related rows; and rows that refer to jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import (
    Mapped,
    Session,
    column_property,
    defer,
    immediateload,
    joinedload,
    load_only,
    mapped_column,
    raiseload,
    relationship,
    selectinload,
    subqueryload,
)

from sqlaqueue import QueueConfig, QueueMixin, claim, complete, fail
from sqlaqueue.exc import StatementError
from tests.mapping.conftest import TidyDatabase, created
from tests.models import STRATEGIES, insert, make_job, new_base


@pytest.fixture(params=STRATEGIES)
def model(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Any]:
    attributes = {
        "payload": mapped_column(sa.Text, deferred=True),
        "attempts": mapped_column(sa.Integer, default=0, deferred=True),
        "max_attempts": mapped_column(sa.Integer, deferred=True),
        "last_error": mapped_column(sa.Text, deferred=True),
        "priority": mapped_column(sa.SmallInteger, default=0, deferred=True),
        "twice": column_property(sa.literal_column("id * 2", sa.Integer)),
    }
    columns = {name: name for name in ("attempts", "max_attempts", "last_error", "priority")}
    model = make_job(request.param, attributes, columns=columns)
    with created(engine, model.metadata):
        insert(engine, model, [{"payload": "x", "max_attempts": 7}])
        yield model


def test_deferred_columns_and_expressions_are_loaded_on_access(model: Any, engine: sa.Engine) -> None:
    with Session(engine) as session:
        job = session.scalars(claim(model, 1)).one()
        assert {"payload", "last_error", "twice"} <= sa.inspect(job).unloaded
        assert (job.payload, job.last_error, job.twice) == ("x", None, 2)
        assert (job.attempts, job.max_attempts) == (1, 7)
        assert session.scalars(fail(job, error="y")).all() == [1]
        session.commit()
        assert (job.attempts, job.last_error) == (1, "y")


@pytest.mark.parametrize(
    "option",
    [lambda job: load_only(job.payload), lambda job: load_only(job.payload, raiseload=True), lambda _: defer("*")],
    ids=["load only", "load only, raise for others", "defer all"],
)
@pytest.mark.parametrize("place", ["on the select", "on the claim"])
def test_a_run_is_recorded_whatever_columns_are_loaded(
    model: Any, engine: sa.Engine, option: Callable[[Any], Any], place: str
) -> None:
    if place == "on the select":
        statement = claim(sa.select(model).options(option(model)), 1)
    else:
        statement = claim(model, 1).options(option(model))
    with Session(engine) as session:
        job = session.scalars(statement).one()
        assert {"last_error", "run_at"} <= sa.inspect(job).unloaded
        assert (job.attempts, job.max_attempts) == (1, 7)
        assert session.scalars(complete(job)).all() == [1]


# -- relationships of claimed instances, and rows that refer to jobs ---------------------------------------------------


class Shop:
    """An order is a job; it belongs to a customer and has lines."""

    def __init__(self, strategy: str, **of_lines: Any) -> None:
        base = new_base()

        class Order(QueueMixin, base):
            __tablename__ = "orders"
            __queue__ = QueueConfig(strategy=strategy)
            id: Mapped[int] = mapped_column(primary_key=True)
            customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey("customer.id"))
            # Both refer to classes that do not exist yet.
            customer: Mapped[Customer | None] = relationship("Customer", back_populates="orders")
            lines: Mapped[list[Line]] = relationship("Line", back_populates="order", **of_lines)

        class Customer(base):
            __tablename__ = "customer"
            id: Mapped[int] = mapped_column(primary_key=True)
            name: Mapped[str]
            orders: Mapped[list[Order]] = relationship(back_populates="customer")

        class Line(base):
            __tablename__ = "line"
            id: Mapped[int] = mapped_column(primary_key=True)
            order_id: Mapped[int] = mapped_column(sa.ForeignKey(Order.id))
            order: Mapped[Order] = relationship(back_populates="lines")
            text: Mapped[str]

        self.metadata, self.Order, self.Customer, self.Line = base.metadata, Order, Customer, Line

    def fill(self, engine: sa.Engine) -> None:
        with Session(engine) as session:
            customer = self.Customer(id=1, name="Ann")
            session.add_all(
                [
                    self.Order(id=1, customer=customer, lines=[self.Line(text="a"), self.Line(text="b")]),
                    self.Order(id=2, customer=customer),
                    self.Order(id=3, lines=[self.Line(text="c")]),
                ]
            )
            session.commit()


@pytest.fixture(params=STRATEGIES)
def shop(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Shop]:
    shop = Shop(request.param)
    with created(engine, shop.metadata):
        shop.fill(engine)
        yield shop


def contents(orders: Any) -> list[Any]:
    return [(order.id, order.customer and order.customer.name, [line.text for line in order.lines]) for order in orders]


CONTENTS = [(1, "Ann", ["a", "b"]), (2, "Ann", []), (3, None, ["c"])]


def unloaded(orders: Any) -> set[str]:
    return {name for order in orders for name in sa.inspect(order).unloaded}


@pytest.mark.parametrize("load", [selectinload, immediateload], ids=lambda load: load.__name__)
@pytest.mark.parametrize("place", ["on the select", "on the claim"])
def test_loader_options_load_related_rows_with_the_claim(shop: Shop, engine: sa.Engine, load: Any, place: str) -> None:
    options = load(shop.Order.lines), load(shop.Order.customer)
    with Session(engine) as session:
        if place == "on the select":
            statement = claim(sa.select(shop.Order).options(*options), 10)
        else:
            statement = claim(shop.Order, 10).options(*options)
        orders = session.execute(statement).scalars().all()
        assert unloaded(orders) == set()
        assert contents(orders) == CONTENTS


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_related_rows_are_loaded_for_an_async_session(
    tidy: TidyDatabase, engine: sa.Engine, strategy: str
) -> None:
    shop = Shop(strategy)
    with created(engine, shop.metadata):
        shop.fill(engine)
        async_engine = create_async_engine(tidy.database.url("asyncpg"))
        async with AsyncSession(async_engine) as session:
            options = selectinload(shop.Order.lines), selectinload(shop.Order.customer)
            orders = (await session.scalars(claim(shop.Order, 10).options(*options))).all()
            assert contents(orders) == CONTENTS
        await async_engine.dispose()


def test_relationships_with_selectin_loading_are_loaded(engine: sa.Engine) -> None:
    shop = Shop("update_status", lazy="selectin")
    with created(engine, shop.metadata), Session(engine) as session:
        shop.fill(engine)
        orders = session.scalars(claim(shop.Order, 10)).all()
        assert "lines" not in unloaded(orders)


@pytest.mark.parametrize("load", [joinedload, subqueryload], ids=lambda load: load.__name__)
def test_joined_loading_has_no_effect(shop: Shop, engine: sa.Engine, load: Any) -> None:
    for statement in (
        claim(shop.Order, 10).options(load(shop.Order.lines)),
        claim(sa.select(shop.Order).options(load(shop.Order.lines)), 10),
    ):
        with Session(engine) as session:
            orders = session.scalars(statement).all()
            assert len(orders) == 3
            assert contents(orders) == CONTENTS
            session.rollback()


def test_relationships_with_joined_loading_are_loaded_on_access(engine: sa.Engine) -> None:
    shop = Shop("batch_select", lazy="joined")
    with created(engine, shop.metadata), Session(engine) as session:
        shop.fill(engine)
        orders = session.scalars(claim(shop.Order, 10)).all()
        assert contents(orders) == CONTENTS


def test_other_loader_options_work(shop: Shop, engine: sa.Engine) -> None:
    with Session(engine) as session:
        order = session.scalars(claim(shop.Order, 1).options(raiseload(shop.Order.lines))).one()
        with pytest.raises(sa.exc.InvalidRequestError, match="raise"):
            _ = order.lines


def test_a_claim_can_join_a_to_one_relationship(shop: Shop, engine: sa.Engine) -> None:
    with Session(engine) as session:
        of_ann = sa.select(shop.Order).join(shop.Order.customer).where(shop.Customer.name == "Ann")
        assert [order.id for order in session.scalars(claim(of_ann, 10))] == [1, 2]
        session.rollback()
        with_lines = sa.select(shop.Order).where(shop.Order.lines.any())
        assert [order.id for order in session.scalars(claim(with_lines, 10))] == [1, 3]
        with pytest.raises(StatementError, match=r"to-many join Order\.lines"):
            claim(sa.select(shop.Order).join(shop.Order.lines), 10)


def test_a_job_is_claimed_while_a_new_row_refers_to_it(shop: Shop, engine: sa.Engine) -> None:
    # The check of the foreign key locks the order until the end of this transaction.
    with Session(engine) as writer, Session(engine) as worker:
        writer.add(shop.Line(order_id=1, text="late"))
        writer.flush()
        worker.execute(sa.text("SET lock_timeout = '5s'"))
        orders = worker.scalars(claim(shop.Order, 10)).all()
        assert [order.id for order in orders] == [1, 2, 3]
        worker.execute(complete(orders))
        worker.commit()
        writer.commit()


def test_rows_can_refer_to_a_held_job(shop: Shop, engine: sa.Engine) -> None:
    with Session(engine) as worker, Session(engine) as writer:
        orders = worker.scalars(claim(shop.Order, 10)).all()
        writer.execute(sa.text("SET lock_timeout = '5s'"))
        writer.add(shop.Line(order_id=1, text="meanwhile"))
        writer.commit()
        assert [line.text for line in orders[0].lines] == ["a", "b", "meanwhile"]


def test_related_rows_added_by_a_handler_are_stored(shop: Shop, engine: sa.Engine) -> None:
    with Session(engine) as session:
        order = session.scalars(claim(shop.Order, 1)).one()
        order.lines.append(shop.Line(text="by the handler"))
        order.customer = None
        session.execute(fail(order))
        session.commit()
        assert contents([order]) == [(1, None, ["a", "b", "by the handler"])]
        assert order.status == "failed"
