"""Values of a QueueConfig that cannot be meant: refused when it is written down, with what to write instead."""

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
    ({"max_attempts": 0}, r"max_attempts=0\): give a whole number from 1 to 32767"),
    ({"max_attempts": 2.5}, r"max_attempts=2.5\): give a whole number"),
    ({"max_attempts": True}, r"max_attempts=True\): give a whole number"),
    ({"max_attempts": 10**6}, r"max_attempts=1000000\): give a whole number"),
    ({"lease": 0}, r"lease=0\): a lease lasts from one second"),
    ({"lease": timedelta(days=400)}, r"lease=.*: a lease lasts .* to a year"),
    ({"lease": -1}, r"lease=...\) must be seconds or a timedelta, zero or more, not -1"),
    ({"lease": float("nan")}, "must be seconds or a timedelta"),
    ({"lease": "60"}, "must be seconds or a timedelta"),
    ({"retry": 5}, r"retry=5\): give a policy such as"),
    ({"columns": ["status"]}, r"columns=\['status'\]\): give the name of an attribute, or None"),
    ({"columns": {"status": 5}}, "give the name of an attribute, or None"),
    ({"columns": {"state": "status"}}, r"columns=...\): 'state' is no queue attribute; they are status, priority"),
    ({"columns": {"status": "x", "run_at": "x"}}, "the attribute 'x' is given to two queue attributes"),
    ({"columns": {"prioritiy": None}}, r"columns=...\): 'prioritiy' is no .*; did you mean 'priority'\?"),
    ({"adopt": "state"}, r"adopt='state'\): give the name of an attribute to each queue attribute"),
    ({"adopt": {"status": "state", "priority": None}}, "'priority': None.*those that are not named are left out"),
    ({"adopt": {"statsu": "state"}}, r"adopt=...\): 'statsu' is no queue attribute; .*; did you mean 'status'\?"),
    ({"adopt": {"state": "status"}}, r"'state' is no queue attribute; .* comes first: \{'status': 'state'\}"),
    ({"adopt": {"status": "x", "run_at": "x"}}, r"adopt=...\): the attribute 'x' is given to two queue attributes"),
    ({"adopt": {"status": "x"}, "columns": {"run_at": None}}, r"columns=\{'run_at': None\}, adopt=.*one of the two"),
    ({"rows_are_messages": 1}, r"rows_are_messages=1\): give True or False"),
    (
        {"rows_are_messages": True, "adopt": {"status": "x"}},
        r"True, adopt=\{'status': 'x', ...\}\): a row that",
    ),
    ({"rows_are_messages": True, "columns": {"status": "x"}}, r"True, columns=\{'status': 'x', ...\}\): a row that"),
    ({"states": {"pending": "new"}}, r"states=\{'pending': 'new'\}\): give sqlaqueue.States"),
    ({"on_complete": "archive"}, r'on_complete=\'archive\'\): give "keep" or "delete"'),
    ({"retention": 7}, r"retention=7\): give a time to each state, as in \{'completed': timedelta\(days=7\)\}"),
    ({"retention": {"done": 7}}, "'done': ...}.: there is no such state; give some of completed, failed, cancelled"),
    ({"retention": {"pending": 7}}, "'pending': ...}.: jobs that are not finished are not deleted; give some of comp"),
    ({"retention": {5: 7}}, "5: ...}.: there is no such state"),
    ({"retention": {"failed": 0}}, "'failed': 0}.: give from one second to 100 years; a state that is not named keeps"),
    ({"retention": {"completed": 0}}, 'give from one second to 100 years; on_complete="delete" keeps none'),
    ({"retention": {"failed": -1}}, "must be seconds or a timedelta, zero or more, not -1"),
    ({"retention": {"failed": None}}, "'failed': ...}. must be seconds or a timedelta"),
    ({"retention": {"failed": timedelta(days=40_000)}}, "give from one second to 100 years"),
    ({"retention": {"completed": 7}, "on_complete": "delete"}, 'on_complete="delete" leaves no completed jobs to keep'),
    ({"notify": "no"}, r"notify='no'\): give True or False"),
    ({"name": ""}, r"name=''\): give a text, or None"),
    ({"name": 5}, r"name=5\): give a text, or None"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        QueueConfig(**given)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pending": None}, "every queue needs a value for waiting jobs"),
        ({"pending": "new", "failed": "new"}, "pending and failed are both 'new'; give each state a value of its own"),
        ({"completed": Colour.RED, "cancelled": Colour.RED}, "completed and cancelled are both"),
        ({"pending": ["new"]}, r"States\(pending=\['new'\]\): give a text, an integer or a member"),
    ],
)
def test_states_that_are_none(given: dict[str, Any], said: str) -> None:
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
def test_policies_that_are_none(policy: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        policy(**given)


def model_with(config: Any, **attributes: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    columns = {"__tablename__": "orders", "__queue__": config, "id": mapped_column(sa.Integer(), primary_key=True)}
    return type("Order", (QueueMixin, Base), {**columns, **attributes})


def test_a_config_that_is_none_names_the_class() -> None:
    with pytest.raises(ConfigurationError, match=r"Order\.__queue__ must be a QueueConfig, not \{\}"):
        model_with({})


@pytest.mark.parametrize("strategy", ["update-status", "", None, object])
def test_an_unknown_strategy_is_refused_with_the_known_ones(strategy: Any) -> None:
    with pytest.raises(UnknownStrategyError, match="there are 'update_status', 'delete_returning', 'batch_select'"):
        model_with(QueueConfig(strategy=strategy))


def test_a_word_that_is_too_long_for_its_column() -> None:
    config = QueueConfig(columns={"status": "status"}, states=States(processing="in progress"))
    with pytest.raises(ConfigurationError, match="Order: its status column cannot hold 'in progress'"):
        model_with(config, status=mapped_column(sa.String(8)))


def test_a_column_that_the_library_makes_holds_long_words() -> None:
    long = "waiting-for-the-warehouse-to-answer"
    order = model_with(QueueConfig(states=States(pending=long)))
    assert order.__table__.c.status.type.length == len(long)


def test_a_table_without_a_key() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Order has no primary key, .* add one to the table orders"):

        class Order(QueueMixin, Base):
            __tablename__ = "orders"
            number: Mapped[int]


def test_a_key_that_only_the_mapping_names() -> None:
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
        ({"states": States(failed=None)}, "Order: .*'failed': ...}. is for a state that its table has no word for"),
    ],
)
def test_a_retention_that_does_not_fit_the_class(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        model_with(QueueConfig(retention={"failed": 60}, **given))


def test_completed_jobs_without_a_state_cannot_be_kept() -> None:
    config = QueueConfig(strategy="delete_returning", rows_are_messages=True, retention={"completed": 60})
    with pytest.raises(ConfigurationError, match="Order: .* nothing is left to keep; leave 'completed' out"):
        model_with(config)


def test_a_retention_is_read_as_time() -> None:
    config = QueueConfig(retention={"completed": 60, "failed": timedelta(days=1)})
    assert config.retention == {"completed": timedelta(minutes=1), "failed": timedelta(days=1)}
    assert QueueConfig().retention == {}
