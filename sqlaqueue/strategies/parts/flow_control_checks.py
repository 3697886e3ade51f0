"""The checks of the configuration of flow control when a class is mapped."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.options import Fair, Limit, Order, Rate
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.queue.strategy_protocol import Strategy
from sqlaqueue.strategies.parts.key_columns import column_named, key_column


def check_flow_control(spec: QueueSpec, strategy: Strategy) -> None:
    """Refuse what would not do what is configured.

    :raises ConfigurationError: with the class, the attribute and the fix.
    """
    config = spec.config
    given: list[Limit | Rate | Order | Fair] = [*config.limits, *config.rates]
    given += [one for one in (config.order, config.fair) if one is not None]
    for one in given:
        _check_one(spec, strategy, one)
    _check_different(spec, "limits", [one.per for one in config.limits])
    _check_different(spec, "rates", [(*one.per, one.every) for one in config.rates])
    if config.order is not None:
        _check_order(spec, config.order)


def _check_one(spec: QueueSpec, strategy: Strategy, one: Limit | Rate | Order | Fair) -> None:
    model, kind = spec.model.__name__, type(one).__name__
    what = f"{model}: {kind}"
    if not strategy.supports_flow_control:
        name = type(strategy).__name__
        msg = f'{what}(...): the strategy {name} does not support it; use strategy="update_status"'
        raise ConfigurationError(msg)
    for name in one.per:
        key_column(spec, name, f"{model}: {_with_key(one, name)}")
    number: Any = one.most if isinstance(one, Limit) else one.weight if isinstance(one, Fair) else None
    if isinstance(number, str):
        where = f"{what}({'weight=' if isinstance(one, Fair) else ''}{number!r})"
        if not isinstance(column_named(spec, number, where).type, sa.Integer):
            msg = f"{where}: {model}.{number} is no integer column"
            raise ConfigurationError(msg)
    priority = spec.columns.get("priority")
    if priority is not None and priority.nullable:
        msg = (
            f"{what}(...) needs a priority that is never NULL; declare the column with nullable=False, or leave the "
            'role out with columns={"priority": None}'
        )
        raise ConfigurationError(msg)


def _with_key(one: Limit | Rate | Order | Fair, name: str) -> str:
    """Return how the key was configured, for errors."""
    if not isinstance(one, Limit | Rate):
        return f"{type(one).__name__}({name!r})"
    number = repr(one.most) if isinstance(one.most, int | str) else "..."
    return f"{type(one).__name__}({number}, per={name!r})"


def _check_different(spec: QueueSpec, option: str, keys: Sequence[Hashable]) -> None:
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        msg = f"{spec.model.__name__}: QueueConfig({option}=...): two of them have the same key; leave one of them out"
        raise ConfigurationError(msg)


def _check_order(spec: QueueSpec, order: Order) -> None:
    model = spec.model.__name__
    what = f"{model}: Order(by={order.by!r})"
    if key_column(spec, order.by, what).nullable:
        msg = f"{what}: {model}.{order.by} may be NULL, which has no place in an order; declare it with nullable=False"
        raise ConfigurationError(msg)
    check_roles(model, {"started_at": "Order(...), to tell the jobs that have begun,"}, spec.columns, spec.config)
    if order.on_failure != "continue" and not spec.has("status"):
        msg = (
            f"{model}: Order(on_failure={order.on_failure!r}): without a status, a failed job leaves the table; use "
            'on_failure="continue"'
        )
        raise ConfigurationError(msg)
    if order.on_failure == "cancel" and spec.config.states.cancelled is None:
        msg = (
            f'{model}: Order(on_failure="cancel") needs a status value for cancelled jobs; set '
            "States(cancelled=...), or use another on_failure"
        )
        raise ConfigurationError(msg)
