"""A worker of a queue with more features needs the privileges of docs/privileges.md: each of them, and no others."""

import re
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import ConcurrencyLimit, Consumer, Fail, InOrder, QueueConfig, QueueMixin, RateLimit, claim
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.consumer.maintenance.cleanup import delete_batch
from sqlaqueue.consumer.maintenance.minutes import measure
from sqlaqueue.consumer.maintenance.state import Walk
from sqlaqueue.exc import DatabaseNotReadyError
from tests.contexts import settings_of
from tests.mapping.test_claim_functions import attach_function, count, name_of
from tests.models import read
from tests.privileges.conftest import Roles, of_page

pytestmark = pytest.mark.once

SECTION = "## Flow control"


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
        flow_control=[
            ConcurrencyLimit(customer_limit, per="customer_id"),
            RateLimit(10, every=1, per="customer_id"),
            InOrder("document_id", on_failure="cancel"),
        ],
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int]
    document_id: Mapped[int]


FUNCTIONS = ["sqlaqueue_capacity_export_customer_id", "sqlaqueue_head_export_document_id", "sqlaqueue_rate_capacity"]


@pytest.fixture
def kind() -> str:
    return "update_status"


@pytest.fixture
def limited(roles: Roles) -> Roles:
    Base.metadata.create_all(roles.engine("owner"))
    roles.execute(*of_page(SECTION))
    return roles


def enqueue(limited: Roles, *documents: int) -> None:
    limited.execute(*(f"INSERT INTO export (customer_id, document_id) VALUES (1, {number})" for number in documents))


def test_a_worker_needs_what_the_page_says(limited: Roles) -> None:
    def fail_first(_session: Session, job: Any) -> None:
        if job.id == 1:
            raise Fail

    enqueue(limited, 1, 1, 2)
    assert Consumer(Export, fail_first, sessionmaker(limited.engine("worker"))).drain() == 2
    # The trigger of the order runs with the privileges of the worker.
    assert [*read(limited.engine("owner"), Export).values()] == ["failed", "cancelled", "completed"]


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_missing_privilege_on_the_times_of_rates_is_named(limited: Roles, right: str) -> None:
    consumer = limited.consumer(Export)
    limited.execute(f"REVOKE {right} ON sqlaqueue_rate FROM worker")
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT {right} ON TABLE sqlaqueue_rate TO worker_\w+$"):
        consumer.drain()


def test_a_consumer_names_the_table_of_the_number_that_it_may_not_read(limited: Roles) -> None:
    limited.execute("REVOKE SELECT (max_parallel) ON customer FROM worker")
    consumer = limited.consumer(Export)
    with pytest.raises(DatabaseNotReadyError, match=r"GRANT SELECT \(max_parallel\) ON TABLE customer TO worker_\w+$"):
        consumer.drain()


def test_without_the_table_of_the_number_a_claim_is_refused(limited: Roles) -> None:
    enqueue(limited, 1)
    limited.execute("REVOKE SELECT (id, max_parallel) ON customer FROM worker")
    with (
        Session(limited.engine("worker")) as session,
        pytest.raises(ProgrammingError, match="permission denied for table customer"),
    ):
        session.execute(claim(Export, 1))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_must_be_executable_where_not_every_role_may(limited: Roles, function: str) -> None:
    enqueue(limited, 1)
    assert [re.sub(r".* FUNCTION (\w+) .*", r"\1", grant) for grant in granted_functions()] == FUNCTIONS
    limited.execute(*of_page("If that was revoked, grant it:"))
    others = [grant for grant in granted_functions() if function not in grant]
    limited.execute(*others)
    with Session(limited.engine("worker")) as session:
        with pytest.raises(ProgrammingError, match=f"permission denied for function {function}"):
            session.execute(claim(Export, 1))
        session.rollback()
        limited.execute(*granted_functions())
        assert len(session.scalars(claim(Export, 1)).all()) == 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_consumer_names_the_function_that_it_may_not_execute(limited: Roles, function: str) -> None:
    limited.execute(*of_page("If that was revoked, grant it:"))
    limited.execute(*(grant for grant in granted_functions() if function not in grant))
    consumer = limited.consumer(Export)
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT EXECUTE ON FUNCTION {function}\("):
        consumer.drain()


def granted_functions() -> list[str]:
    return of_page("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC;")


def test_a_role_that_reads_sees_what_holds_jobs_back(limited: Roles) -> None:
    enqueue(limited, 1)
    limited.execute(*of_page("## Reading statistics"))
    with Session(limited.engine("reader")) as session:
        admin = QueueAdmin(session, Export)
        with pytest.raises(ProgrammingError, match="permission denied"):
            admin.stats()
        session.rollback()
        limited.execute(*of_page("For a number by a select `QueueAdmin.explain()` and `.stats()` read its table:"))
        assert admin.stats().at_limit == []
        assert admin.explain(1).reasons


# -- attempt history ---------------------------------------------------------------------------------------------------


class Ticket(QueueMixin, Base):
    __tablename__ = "ticket"
    __queue__ = QueueConfig(attempt_history=timedelta(days=14))
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def recorded(roles: Roles) -> Roles:
    Base.metadata.create_all(roles.engine("owner"))
    others = [grant.replace(" email ", " ticket ") for grant in of_page("### `update_status`")]
    roles.execute(*others, *of_page("## Attempt history"))
    return roles


def test_a_worker_with_a_history_needs_what_the_page_says(recorded: Roles) -> None:
    recorded.execute("INSERT INTO ticket DEFAULT VALUES", "INSERT INTO ticket DEFAULT VALUES")
    engine = recorded.engine("worker")
    assert recorded.consumer(Ticket).drain() == 2
    recorded.execute("UPDATE sqlaqueue_attempt SET ended_at = now() - interval '15 days' WHERE key = '[1]'")
    with Session(engine) as session:
        assert delete_batch(session, settings_of(Ticket), Walk("attempt", timedelta(days=14))).number == 1
        assert [one.outcome for one in QueueAdmin(session, Ticket).attempts(2)] == ["completed"]


def test_a_worker_with_a_history_may_rescue(recorded: Roles) -> None:
    recorded.execute("INSERT INTO ticket DEFAULT VALUES")
    with Session(recorded.engine("worker")) as session:
        assert len(session.scalars(claim(Ticket, 1)).all()) == 1
        session.commit()
        recorded.execute("UPDATE ticket SET lease_expires_at = now() - interval '1 second'")
        assert QueueAdmin(session, Ticket).rescue() == 1


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_missing_privilege_on_the_history_is_named(recorded: Roles, right: str) -> None:
    columns = " (ended_at)" if right == "UPDATE" else ""
    recorded.execute(f"REVOKE {right}{columns} ON sqlaqueue_attempt FROM worker")
    consumer = recorded.consumer(Ticket)
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT {right}( \(ended_at\))? ON TABLE sqlaqueue_attempt"):
        consumer.drain()


def test_a_role_that_enqueues_needs_nothing_for_a_history(recorded: Roles) -> None:
    recorded.execute(
        "GRANT INSERT ON ticket TO web", "GRANT SELECT (id, status, priority, run_at, attempts) ON ticket TO web"
    )
    recorded.execute("GRANT SELECT (created_at) ON ticket TO web", "GRANT USAGE ON SEQUENCE ticket_id_seq TO web")
    with Session(recorded.engine("web")) as session:
        session.add(Ticket())
        session.commit()
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied for table sqlaqueue_attempt"):
            session.execute(sa.text("SELECT 1 FROM sqlaqueue_attempt"))


# -- statistics --------------------------------------------------------------------------------------------------------


class Crate(QueueMixin, Base):
    __tablename__ = "crate"
    __queue__ = QueueConfig(statistics=True)
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def counted(roles: Roles) -> Roles:
    Base.metadata.create_all(roles.engine("owner"))
    others = [grant.replace(" email ", " crate ") for grant in of_page("### `update_status`")]
    roles.execute(*others, *of_page("## Statistics of a queue"))
    return roles


def test_a_worker_with_statistics_needs_what_the_page_says(counted: Roles) -> None:
    counted.execute(
        "INSERT INTO crate DEFAULT VALUES", "INSERT INTO sqlaqueue_minute (queue, minute) VALUES ('crate', 1)"
    )
    assert counted.consumer(Crate).drain() == 1
    with Session(counted.engine("worker")) as session:
        assert session.scalar(sa.text("SELECT sum(completed) FROM sqlaqueue_minute")) == 1
        session.rollback()
        measure(session, settings_of(Crate), 0.0)
        # What is older than a month is deleted.
        assert session.scalar(sa.text("SELECT min(minute) FROM sqlaqueue_minute")) > 1


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_missing_privilege_on_the_statistics_is_named(counted: Roles, right: str) -> None:
    counted.execute(f"REVOKE {right} ON sqlaqueue_minute FROM worker")
    consumer = counted.consumer(Crate)
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT {right} ON TABLE sqlaqueue_minute TO worker_\w+$"):
        consumer.drain()


# -- functions that statements call, which by default every role may execute -------------------------------------------


class Parcel(QueueMixin, Base):
    __tablename__ = "a parcel"
    __queue__ = QueueConfig()
    id = mapped_column(sa.Integer, primary_key=True)


TABLE = sa.inspect(Parcel).local_table
attach_function(TABLE)


@pytest.mark.parametrize("schema", [None, "other place"])
def test_a_function_that_the_role_may_not_execute_is_named(roles: Roles, schema: str | None) -> None:
    translated = {"execution_options": {"schema_translate_map": {None: schema}}}
    if schema is not None:
        roles.execute(f'CREATE SCHEMA "{schema}"', f'GRANT ALL ON SCHEMA "{schema}" TO owner')
        roles.execute(f'GRANT USAGE ON SCHEMA "{schema}" TO worker')
    place = f'"{schema or "public"}"'
    Base.metadata.create_all(roles.engine("owner", **translated))
    engine = roles.engine("worker", **translated)
    roles.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {place} TO worker")
    consumer = roles.consumer(Parcel, **translated)
    assert consumer.drain() == 0
    roles.execute(f'REVOKE EXECUTE ON FUNCTION {place}."{name_of(TABLE)}" FROM PUBLIC')
    with pytest.raises(DatabaseNotReadyError) as refused:
        consumer.drain()
    (grant,) = re.findall(r"GRANT .*? TO \w+", str(refused.value))
    named = f'{place}."{name_of(TABLE)}"' if schema else f'"{name_of(TABLE)}"'
    assert grant.startswith(f"GRANT EXECUTE ON FUNCTION {named}(bigint,timestamp with time zone) TO worker_")
    # The statement in the error is the fix.
    roles.execute(grant)
    assert consumer.drain() == 0
    with engine.connect() as connection:
        assert connection.scalar(count(TABLE, 0)) == 0
