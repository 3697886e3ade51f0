"""A worker under flow control works with the privileges of docs/privileges.md, and needs each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, Fail, Limit, Order, QueueConfig, QueueMixin, Rate, admin, claim
from sqlaqueue.exc import DatabaseNotReadyError
from tests.privileges.conftest import Roles, of_page
from tests.servers import Server

pytestmark = pytest.mark.once

SECTION = "## Limits, rates, order and turns"


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    max_parallel: Mapped[int | None]


def customer_limit(job: Any) -> Any:
    return sa.select(Customer.max_parallel).where(Customer.id == job.customer_id)


class Export(QueueMixin, Base):
    __tablename__ = "export"
    __queue__ = QueueConfig(
        limits=[Limit(customer_limit, per="customer_id")],
        rates=[Rate(10, every=1, per="customer_id")],
        order=Order("document_id", on_failure="cancel"),
        columns={"started_at": "started_at"},
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int]
    document_id: Mapped[int]


FUNCTIONS = [
    "sqlaqueue_capacity_export_customer_id",
    "sqlaqueue_head_export_document_id",
    "sqlaqueue_rate_capacity",
]


@pytest.fixture
def roles(server: Server) -> Iterator[Roles]:
    with server.database() as database:
        roles = Roles(database, "update_status")
        try:
            Base.metadata.create_all(roles.engine("owner"))
            roles.execute(*of_page(SECTION))
            yield roles
        finally:
            roles.close()


def enqueue(roles: Roles, *documents: int) -> None:
    roles.execute(*(f"INSERT INTO export (customer_id, document_id) VALUES (1, {number})" for number in documents))


def states(roles: Roles) -> list[str]:
    with Session(roles.engine("owner")) as session:
        return [*session.scalars(sa.select(Export.status).order_by(Export.id))]


def test_a_worker_needs_what_the_page_says(roles: Roles) -> None:
    def fail_first(_session: Session, job: Any) -> None:
        if job.id == 1:
            raise Fail

    enqueue(roles, 1, 1, 2)
    assert Consumer(Export, fail_first, sessionmaker(roles.engine("worker"))).drain() == 2
    # The trigger of the order runs with the privileges of the worker.
    assert states(roles) == ["failed", "cancelled", "completed"]


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_missing_privilege_on_the_times_of_rates_is_named(roles: Roles, right: str) -> None:
    consumer = Consumer(Export, lambda session, job: None, sessionmaker(roles.engine("worker")))
    roles.execute(f"REVOKE {right} ON sqlaqueue_rate FROM worker")
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT {right} ON TABLE sqlaqueue_rate TO worker_\w+$"):
        consumer.drain()


def test_a_consumer_names_the_table_of_the_number_that_it_may_not_read(roles: Roles) -> None:
    roles.execute("REVOKE SELECT (max_parallel) ON customer FROM worker")
    consumer = Consumer(Export, lambda session, job: None, sessionmaker(roles.engine("worker")))
    with pytest.raises(DatabaseNotReadyError, match=r"GRANT SELECT \(max_parallel\) ON TABLE customer TO worker_\w+$"):
        consumer.drain()


def test_without_the_table_of_the_number_a_claim_is_refused(roles: Roles) -> None:
    enqueue(roles, 1)
    roles.execute("REVOKE SELECT (id, max_parallel) ON customer FROM worker")
    with (
        Session(roles.engine("worker")) as session,
        pytest.raises(ProgrammingError, match="permission denied for table customer"),
    ):
        session.execute(claim(Export, 1))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_must_be_executable_where_not_every_role_may(roles: Roles, function: str) -> None:
    enqueue(roles, 1)
    assert [re.sub(r".* FUNCTION (\w+) .*", r"\1", grant) for grant in granted_functions()] == FUNCTIONS
    roles.execute(*of_page("If that was revoked, grant it:"))
    others = [grant for grant in granted_functions() if function not in grant]
    roles.execute(*others)
    with Session(roles.engine("worker")) as session:
        with pytest.raises(ProgrammingError, match=f"permission denied for function {function}"):
            session.execute(claim(Export, 1))
        session.rollback()
        roles.execute(*granted_functions())
        assert len(session.scalars(claim(Export, 1)).all()) == 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_consumer_names_the_function_that_it_may_not_execute(roles: Roles, function: str) -> None:
    roles.execute(*of_page("If that was revoked, grant it:"))
    roles.execute(*(grant for grant in granted_functions() if function not in grant))
    consumer = Consumer(Export, lambda session, job: None, sessionmaker(roles.engine("worker")))
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT EXECUTE ON FUNCTION {function}\("):
        consumer.drain()


def granted_functions() -> list[str]:
    return of_page("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC;")


def test_a_role_that_reads_sees_what_holds_jobs_back(roles: Roles) -> None:
    enqueue(roles, 1)
    roles.execute(*of_page("## Reading statistics"))
    with Session(roles.engine("reader")) as session:
        with pytest.raises(ProgrammingError, match="permission denied"):
            admin.stats(session, Export)
        session.rollback()
        roles.execute(*of_page("For a number by a select `explain_job()` and `stats()` read its table:"))
        assert admin.stats(session, Export).at_limit == []
        assert admin.explain_job(session, Export, 1).reasons
