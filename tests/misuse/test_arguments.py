"""A QueueConfig, a class and a verb refuse arguments that cannot work, and the error says what to use instead."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, relationship

from sqlaqueue import (
    ConcurrencyLimit,
    Constant,
    Exponential,
    FairShare,
    InOrder,
    Linear,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Schedule,
    States,
    Unique,
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.exc import ConfigurationError, NotAQueueError, NotClaimedError, StatementError, UnknownStrategyError
from tests.models import make_job, new_base
from tests.servers import Server

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_attempts": 0}, r"max_attempts=0\): use an integer from 1 to 32767"),
    ({"max_attempts": 2.5}, r"max_attempts=2.5\): use an integer"),
    ({"max_attempts": True}, r"max_attempts=True\): use an integer"),
    ({"max_attempts": 10**6}, r"max_attempts=1000000\): use an integer"),
    ({"lease": 0}, r"lease=0\): a lease must be from one second"),
    ({"lease": timedelta(days=400)}, r"lease=.*: a lease must be .* to one year"),
    ({"lease": -1}, r"lease=...\) must be seconds or a timedelta, zero or more, not -1"),
    ({"lease": float("nan")}, "must be seconds or a timedelta"),
    ({"lease": "60"}, "must be seconds or a timedelta"),
    ({"retry": 5}, r"retry=5\): use a policy such as"),
    ({"columns": ["status"]}, r"columns=\['status'\]\): map each queue attribute to the name of an attribute, or None"),
    ({"columns": {"status": 5}}, "map each queue attribute to the name of an attribute, or None"),
    ({"columns": {"state": "status"}}, r"columns=...\): 'state' is not a queue attribute; those are status, priority"),
    ({"columns": {"status": "x", "run_at": "x"}}, "the attribute 'x' has two roles"),
    ({"columns": {"prioritiy": None}}, r"columns=...\): 'prioritiy' is not .*; did you mean 'priority'\?"),
    ({"adopt": "state"}, r"adopt='state'\): map each queue attribute that the class has"),
    ({"adopt": {"status": "state", "priority": None}}, "'priority': None.*those that are not named are left out"),
    ({"adopt": {"statsu": "state"}}, r"adopt=...\): 'statsu' is not a queue attribute; .*; did you mean 'status'\?"),
    ({"adopt": {"state": "status"}}, r"'state' is not a queue attribute; .* comes first: \{'status': 'state'\}"),
    ({"adopt": {"status": "x", "run_at": "x"}}, r"adopt=...\): the attribute 'x' has two roles"),
    ({"adopt": {"status": "x"}, "columns": {"run_at": None}}, r"columns=\{'run_at': None\}, adopt=.*one of the two"),
    ({"rows_are_messages": 1}, r"rows_are_messages=1\): use True or False"),
    ({"rows_are_messages": True, "adopt": {"status": "x"}}, r"True, adopt=\{'status': 'x', ...\}\): a row that"),
    ({"rows_are_messages": True, "columns": {"status": "x"}}, r"True, columns=\{'status': 'x', ...\}\): a row that"),
    ({"states": {"pending": "new"}}, r"states=\{'pending': 'new'\}\): use sqlaqueue.States"),
    ({"on_complete": "archive"}, r'on_complete=\'archive\'\): use "keep" or "delete"'),
    ({"retention": 7}, r"retention=7\): map states to durations, as in \{'completed': timedelta\(days=7\)\}"),
    ({"retention": {"done": 7}}, "'done': ...}.: there is no such state; use some of completed, failed, cancelled"),
    ({"retention": {"pending": 7}}, "'pending': ...}.: only finished jobs are deleted; use some of completed"),
    ({"retention": {5: 7}}, "5: ...}.: there is no such state"),
    ({"retention": {"failed": 0}}, "'failed': 0}.: use from one second to 100 years; jobs in states that are"),
    ({"retention": {"completed": 0}}, 'use from one second to 100 years; on_complete="delete" keeps none'),
    ({"retention": {"failed": -1}}, "must be seconds or a timedelta, zero or more, not -1"),
    ({"retention": {"failed": None}}, "'failed': ...}. must be seconds or a timedelta"),
    ({"retention": {"failed": timedelta(days=40_000)}}, "use from one second to 100 years"),
    (
        {"attempt_history": 0},
        r"attempt_history=0\): use seconds or a timedelta, from one second to 100 years, as in attempt_history=",
    ),
    ({"statistics": 1}, r"QueueConfig\(statistics=1\): use True or False"),
    ({"statistics": None}, r"QueueConfig\(statistics=None\): use True or False"),
    ({"attempt_history": True}, r"attempt_history=True\): use seconds or a timedelta, from one second"),
    ({"attempt_history": "14 days"}, r"attempt_history='14 days'\): use seconds or a timedelta, from one second"),
    ({"attempt_history": -1}, r"attempt_history=-1\): use seconds or a timedelta, from one second"),
    ({"attempt_history": timedelta(days=40_000)}, "from one second to 100 years"),
    ({"retention": {"completed": 7}, "on_complete": "delete"}, 'on_complete="delete" keeps no completed jobs'),
    ({"notify": "no"}, r"notify='no'\): use True or False"),
    ({"name": ""}, r"name=''\): use a text, or None"),
    ({"name": 5}, r"name=5\): use a text, or None"),
]


@pytest.mark.once
@pytest.mark.parametrize(("given", "said"), WRONG)
def test_an_invalid_value_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        QueueConfig(**given)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pending": None}, "every queue needs a value for pending jobs"),
        (
            {"pending": "new", "failed": "new"},
            "pending and failed are both 'new'; use a different value for each state",
        ),
        ({"completed": Colour.RED, "cancelled": Colour.RED}, "completed and cancelled are both"),
        ({"pending": ["new"]}, r"States\(pending=\['new'\]\): use a text, an integer or an enum member"),
    ],
)
def test_invalid_states_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        States(**given)


@pytest.mark.once
@pytest.mark.parametrize(
    ("policy", "given", "said"),
    [
        (Constant, {"delay": -1}, "Constant"),
        (Linear, {"step": float("inf")}, "Linear"),
        (Exponential, {"jitter": 2}, r"Exponential\(jitter=2\): jitter must be between 0 and 1"),
        (Exponential, {"cap": "1h"}, r"Exponential\(cap=...\)"),
    ],
)
def test_invalid_retry_policies_are_refused(policy: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        policy(**given)


@pytest.mark.once
def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Job\.__queue__ must be a QueueConfig, not \{\}"):
        make_job("update_status", {"__queue__": {}})


@pytest.mark.once
@pytest.mark.parametrize("strategy", ["update-status", "", None, object])
def test_an_unknown_strategy_is_refused_with_the_known_ones(strategy: Any) -> None:
    said = (
        rf"^Job: QueueConfig\(strategy={strategy!r}\): .* there are 'update_status', 'delete_returning', 'batch_select'"
    )
    with pytest.raises(UnknownStrategyError, match=said):
        make_job(strategy=strategy)


@pytest.mark.once
def test_a_similar_strategy_is_suggested() -> None:
    misspelt: Any = "update_stats"
    with pytest.raises(UnknownStrategyError, match=r"did you mean 'update_status'\?$"):
        make_job(misspelt)


@pytest.mark.once
@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        (
            QueueConfig,
            {"flow_controll": []},
            "QueueConfig.*'flow_controll'; .* strategy, .*; did you mean 'flow_control'?",
        ),
        (
            Unique,
            {"per": "a"},
            "Unique.*'per'; its parameters are *attributes, states, within, nulls_distinct, on_return",
        ),
        (InOrder, {"per": "a"}, "InOrder.*'per'; its parameters are *attributes, by, on_failure"),
        (
            FairShare,
            {"wieght": 2},
            "FairShare.*'wieght'; its parameters are *attributes, weight; did you mean 'weight'?",
        ),
        (
            RateLimit,
            {"most": 1},
            "RateLimit.*: missing a required.* argument: 'every'; its parameters are most, every, per, burst",
        ),
        (ConcurrencyLimit, {"max": 1}, "ConcurrencyLimit.*; its parameters are most, per"),
        (Schedule, {"grace": 5}, "Schedule.*; its parameters are name, model, .* misfire_grace"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_those_that_do(
    made: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        made(**given)
    pattern = ".*".join(map(re.escape, said.split(".*")))
    assert re.match(pattern, str(raised.value)), str(raised.value)


@pytest.mark.once
def test_a_checked_constructor_has_its_own_signature() -> None:
    assert list(inspect.signature(Unique).parameters) == [
        "attributes",
        "states",
        "within",
        "nulls_distinct",
        "on_return",
    ]
    assert (QueueConfig.__init__.__name__, len(inspect.signature(QueueConfig).parameters)) == ("__init__", 18)


@pytest.mark.once
def test_a_status_value_that_is_too_long_for_its_column_is_refused() -> None:
    states, status = States(processing="in progress"), mapped_column(sa.String(8))
    with pytest.raises(ConfigurationError, match="Job: its status column cannot hold 'in progress'"):
        make_job("update_status", {"status": status}, columns={"status": "status"}, states=states)


@pytest.mark.once
def test_the_status_column_fits_long_values() -> None:
    long = "waiting-for-the-warehouse-to-answer"
    assert make_job(states=States(pending=long)).__table__.c.status.type.length == len(long)


@pytest.mark.once
def test_a_table_without_primary_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order has no primary key, .* add one to the table orders"):

        class Order(QueueMixin, new_base()):
            __tablename__ = "orders"
            number: Mapped[int]


@pytest.mark.once
def test_a_primary_key_of_the_mapping_is_enough() -> None:
    base = new_base()

    class Order(QueueMixin, base):
        __table__ = sa.Table("orders", base.metadata, sa.Column("number", sa.Integer()))
        __mapper_args__: dict[str, Any] = {"primary_key": [__table__.c.number]}  # noqa: RUF012 - as SQLAlchemy reads it

    assert [key.name for key in sa.inspect(Order).primary_key] == ["number"]


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"columns": {"finished_at": None}}, "Job: .* needs the queue attribute 'finished_at'"),
        ({"states": States(failed=None)}, "Job: .*'failed': ...}. is for a state that has no status value"),
    ],
)
def test_a_retention_without_its_columns_or_states_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_job(retention={"failed": 60}, **given)


@pytest.mark.once
def test_retention_of_completed_jobs_needs_a_status() -> None:
    with pytest.raises(ConfigurationError, match="Job: .* nothing is left to keep; leave 'completed' out"):
        make_job("rows_are_messages", retention={"completed": 60})


@pytest.mark.once
def test_an_attempt_history_becomes_a_timedelta() -> None:
    assert QueueConfig(attempt_history=60).attempt_history == timedelta(minutes=1)
    assert QueueConfig().attempt_history is None


@pytest.mark.once
def test_retention_becomes_timedeltas() -> None:
    config = QueueConfig(retention={"completed": 60, "failed": timedelta(days=1)})
    assert config.retention == {"completed": timedelta(minutes=1), "failed": timedelta(days=1)}
    assert QueueConfig().retention == {}


# -- verbs refuse arguments for which no correct statement exists ------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    vip: Mapped[bool] = mapped_column(default=False)


class Order(QueueMixin, Base):
    __tablename__ = "orders"
    __queue__ = QueueConfig(strategy="batch_select")
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Customer.id))
    customer: Mapped[Customer | None] = relationship()
    lines: Mapped[list[Line]] = relationship()


class Line(Base):
    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(sa.ForeignKey(Order.id))


class Email(QueueMixin, Base):
    __tablename__ = "email"
    id: Mapped[int] = mapped_column(primary_key=True)


class Abstract(QueueMixin, Base):
    __abstract__ = True


class Unmapped(QueueMixin):
    pass


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[sa.Engine]:
    with server.database() as database:
        engine = sa.create_engine(database.url())
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2", None, sa.literal(2)])
def test_claiming_an_invalid_number_of_jobs_is_refused(n: Any) -> None:
    with pytest.raises(StatementError, match=r"claim\(Email, .*: the number of jobs must be an integer of 1 or more"):
        claim(Email, n)


NOT_QUEUES = {
    "Customer is not a queue; let it inherit from sqlaqueue.QueueMixin": Customer,
    "Abstract is abstract and has no table; use one of its mapped subclasses": Abstract,
    "Unmapped is not mapped; map it": Unmapped,
    "is not a mapped class": "email",
}


@pytest.mark.parametrize("said", NOT_QUEUES)
@pytest.mark.parametrize("verb", [lambda model: claim(model, 1), rescue, reconcile, purge])
def test_a_class_that_is_not_a_queue_is_refused(verb: Any, said: str) -> None:
    with pytest.raises(NotAQueueError, match=said):
        verb(NOT_QUEUES[said])


@pytest.mark.parametrize("verb", [cancel, requeue, complete, retry, fail, release, extend])
@pytest.mark.parametrize("job", [5, "email", None, Customer(id=1)])
def test_an_argument_that_is_not_a_job_is_refused(verb: Any, job: Any) -> None:
    with pytest.raises(NotAQueueError, match=rf"{verb.__name__}\(\) takes"):
        verb(job)


SELECTS = {
    "select exactly one queue class": sa.select(Order, Email),
    "select exactly one queue class, ": sa.select(Order.id),
    "DISTINCT cannot be combined": sa.select(Order).distinct(),
    "GROUP BY cannot be combined": sa.select(Order).group_by(Order.id),
    "HAVING cannot be combined": sa.select(Order).having(sa.func.count() > 1),
    "LIMIT cannot be combined": sa.select(Order).limit(5),
    "OFFSET cannot be combined": sa.select(Order).offset(5),
    "ORDER BY cannot be combined": sa.select(Order).order_by(Order.id),
    "FOR UPDATE cannot be combined": sa.select(Order).with_for_update(),
    r"the to-many join Order\.lines returns a job more than once; use exists": sa.select(Order).join(Order.lines),
    "a full outer join returns a job more than once": sa.select(Order).join(Order.customer, full=True),
    "no condition connects the tables email and orders": sa.select(Order).where(Email.id == 1),
    "no condition connects the tables customer and orders": sa.select(Order).where(Customer.vip),
}


@pytest.mark.parametrize("said", SELECTS)
def test_a_select_whose_rows_cannot_be_locked_is_refused(said: str) -> None:
    with pytest.raises(StatementError, match=said):
        claim(SELECTS[said], 1)


def test_joins_that_yield_each_job_once_are_accepted(session: Session) -> None:
    """To-one joins, outer joins, and conditions that connect a third table through a second."""
    session.add(Order(customer=Customer(vip=True), lines=[Line(), Line()]))
    session.flush()
    line, customer = aliased(Line), aliased(Customer)
    for jobs in (
        sa.select(Order).outerjoin(Order.customer).where(Customer.vip),
        sa.select(Order).where(Order.customer_id == customer.id, customer.vip),
        sa.select(Order).where(sa.exists().where(line.order_id == Order.id)),
        sa.select(Order).where(Order.lines.any(), Order.customer.has(vip=True)),
        sa.select(Order).where(Order.customer_id == customer.id, line.order_id == Order.id),
    ):
        with session.begin_nested() as savepoint:
            assert len(session.scalars(claim(jobs, 5)).all()) == 1
            savepoint.rollback()


@pytest.mark.parametrize("on", ["batch_select", "update_status"])
def test_a_datetime_without_time_zone_is_refused(on: str, session: Session) -> None:
    naive = datetime(2030, 1, 1)  # noqa: DTZ001 - what the test is about
    model: Any = Order if on == "batch_select" else Email
    name = model.__name__
    with pytest.raises(StatementError, match=rf"{name}\.run_at = datetime.*use a datetime with tzinfo"):
        model(run_at=naive)
    job = model(run_at=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(StatementError, match=rf"{name}\.run_at = datetime"):
        job.run_at = naive
    session.add(job)
    session.flush()
    [claimed] = session.scalars(claim(model, 1)).all()
    with pytest.raises(StatementError, match=rf"{name}\.run_at has a time zone; use a datetime with tzinfo"):
        retry(claimed, at=naive)
    with pytest.raises(StatementError, match="give one of the two"):
        retry(claimed, at=datetime.now(UTC), delay=1)


@pytest.mark.parametrize("lease", [-1, "5", float("inf")])
def test_an_invalid_lease_is_refused(lease: Any, session: Session) -> None:
    session.add(Email())
    session.flush()
    jobs = session.scalars(claim(Email, 1)).all()
    with pytest.raises(ConfigurationError, match="lease="):
        extend(jobs, lease=lease)


@pytest.mark.parametrize("states", [(), ("pending",), ("done",), "failed", 5])
def test_purging_unfinished_states_is_refused(states: Any) -> None:
    said = f"purge(states={states!r}): use a tuple of some of completed, failed, cancelled; only finished jobs can be"
    with pytest.raises(StatementError, match=re.escape(said)):
        purge(Order, states=states)


@pytest.mark.parametrize("limit", [0, True, "5"])
def test_an_invalid_purge_limit_is_refused(limit: Any) -> None:
    with pytest.raises(StatementError, match=r"purge\(limit=.*: the limit must be an integer of 1 or more"):
        purge(Order, limit=limit)


SETTLING = {"complete": complete, "retry": retry, "fail": fail, "release": release, "extend": extend}


@pytest.mark.parametrize("verb", SETTLING)
def test_settling_a_job_that_was_not_claimed_is_refused(verb: str, session: Session) -> None:
    job = Order()
    session.add(job)
    session.flush()
    with pytest.raises(NotClaimedError, match=rf"{verb}\(\): Order \d+ was not claimed"):
        SETTLING[verb](job)


@pytest.mark.once
@pytest.mark.parametrize("verb", SETTLING)
def test_settling_what_is_no_claimed_instance_is_refused(verb: str) -> None:
    with pytest.raises(NotClaimedError, match=rf"{verb}\(\): Order was not claimed; pass an instance"):
        SETTLING[verb](Order())
    with pytest.raises(StatementError, match=rf"{verb}\(\) takes an instance of Order, or several, and not the class"):
        SETTLING[verb](Order)
    with pytest.raises(NotAQueueError, match=rf"{verb}\(\) takes an instance of a queue class, or several, not <class"):
        SETTLING[verb](Session)


@pytest.mark.parametrize("verb", SETTLING)
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_settling_after_the_transaction_ended_is_refused(verb: str, end: str, engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(Order())
        session.commit()
        jobs = session.scalars(claim(Order, 1)).all()
        getattr(session, end)()
        with pytest.raises(
            NotClaimedError, match=rf"{verb}\(\): the transaction that held Order .* claim the job again"
        ):
            SETTLING[verb](jobs)


@pytest.mark.parametrize("verb", [cancel, requeue])
def test_a_job_without_a_row_is_refused(verb: Any) -> None:
    with pytest.raises(StatementError, match="this Order is not in the database yet; add it to a session and flush"):
        verb(Order())
