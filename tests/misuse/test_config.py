"""A QueueConfig refuses invalid values when it is made, and its error says what to use instead."""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, Exponential, Linear, QueueConfig, QueueMixin, States
from sqlaqueue.exc import ConfigurationError, UnknownStrategyError

pytestmark = pytest.mark.once

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
    (
        {"rows_are_messages": True, "adopt": {"status": "x"}},
        r"True, adopt=\{'status': 'x', ...\}\): a row that",
    ),
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
    ({"attempt_history": True}, r"attempt_history=True\): use seconds or a timedelta, from one second"),
    ({"attempt_history": "14 days"}, r"attempt_history='14 days'\): use seconds or a timedelta, from one second"),
    ({"attempt_history": -1}, r"attempt_history=-1\): use seconds or a timedelta, from one second"),
    ({"attempt_history": timedelta(days=40_000)}, "from one second to 100 years"),
    ({"retention": {"completed": 7}, "on_complete": "delete"}, 'on_complete="delete" keeps no completed jobs'),
    ({"notify": "no"}, r"notify='no'\): use True or False"),
    ({"name": ""}, r"name=''\): use a text, or None"),
    ({"name": 5}, r"name=5\): use a text, or None"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_an_invalid_value_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        QueueConfig(**given)


class Colour(enum.Enum):
    RED = 1


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


def model_with(config: Any, **attributes: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    columns = {"__tablename__": "orders", "__queue__": config, "id": mapped_column(sa.Integer(), primary_key=True)}
    return type("Order", (QueueMixin, Base), {**columns, **attributes})


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order\.__queue__ must be a QueueConfig, not \{\}"):
        model_with({})


@pytest.mark.parametrize("strategy", ["update-status", "", None, object])
def test_an_unknown_strategy_is_refused_with_the_known_ones(strategy: Any) -> None:
    with pytest.raises(UnknownStrategyError, match="there are 'update_status', 'delete_returning', 'batch_select'"):
        model_with(QueueConfig(strategy=strategy))


def test_a_status_value_that_is_too_long_for_its_column_is_refused() -> None:
    config = QueueConfig(columns={"status": "status"}, states=States(processing="in progress"))
    with pytest.raises(ConfigurationError, match="Order: its status column cannot hold 'in progress'"):
        model_with(config, status=mapped_column(sa.String(8)))


def test_the_status_column_fits_long_values() -> None:
    long = "waiting-for-the-warehouse-to-answer"
    order = model_with(QueueConfig(states=States(pending=long)))
    assert order.__table__.c.status.type.length == len(long)


def test_a_table_without_primary_key_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Order has no primary key, .* add one to the table orders"):

        class Order(QueueMixin, Base):
            __tablename__ = "orders"
            number: Mapped[int]


def test_a_primary_key_of_the_mapping_is_enough() -> None:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __table__ = sa.Table("orders", Base.metadata, sa.Column("number", sa.Integer()))
        __mapper_args__: dict[str, Any] = {"primary_key": [__table__.c.number]}  # noqa: RUF012 - as SQLAlchemy reads it

    assert [key.name for key in sa.inspect(Order).primary_key] == ["number"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"columns": {"finished_at": None}},
            "Order: .* needs the queue attribute 'finished_at'",
        ),
        ({"states": States(failed=None)}, "Order: .*'failed': ...}. is for a state that has no status value"),
    ],
)
def test_a_retention_without_its_columns_or_states_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        model_with(QueueConfig(retention={"failed": 60}, **given))


def test_retention_of_completed_jobs_needs_a_status() -> None:
    config = QueueConfig(strategy="delete_returning", rows_are_messages=True, retention={"completed": 60})
    with pytest.raises(ConfigurationError, match="Order: .* nothing is left to keep; leave 'completed' out"):
        model_with(config)


def test_an_attempt_history_becomes_a_timedelta() -> None:
    assert QueueConfig(attempt_history=60).attempt_history == timedelta(minutes=1)
    assert QueueConfig().attempt_history is None


def test_retention_becomes_timedeltas() -> None:
    config = QueueConfig(retention={"completed": 60, "failed": timedelta(days=1)})
    assert config.retention == {"completed": timedelta(minutes=1), "failed": timedelta(days=1)}
    assert QueueConfig().retention == {}
