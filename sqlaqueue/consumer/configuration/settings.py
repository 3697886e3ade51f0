"""The settings of a Consumer, checked and resolved once. They never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict

import sqlalchemy as sa

from sqlaqueue.consumer.configuration.handlers import Dispatch
from sqlaqueue.exc import ConfigurationError, JobTimeout
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.triggers import wakes
from sqlaqueue.queue.config import check_lease, is_count
from sqlaqueue.queue.options import SHARD, Distribution
from sqlaqueue.queue.retry_policies import Delay, RetryPolicy, seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.schedule import Schedule, ScheduleGroup, schedule_groups
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.statements.selection import JobSelection, select_jobs
from sqlaqueue.statements.verbs import storable

BATCH = 500
"""How many jobs one claim takes at most, unless ``batch_size`` is given or more handlers run at once."""


class ConsumerOptions(TypedDict, total=False):
    """The options of a Consumer, for type checkers; :class:`~sqlaqueue.Consumer` describes them."""

    batch_size: int | None
    concurrency: int
    poll_interval: Delay
    lease: Delay | None
    timeout: Delay | None
    grace: Delay
    retry: RetryPolicy | None
    name: str | None
    signals: bool
    schedules: Sequence[Schedule[Any] | type[Any]]
    around: Sequence[Callable[[Any, Callable[[], Any]], Any]]
    distribution: Distribution | None


@dataclass(frozen=True, eq=False)
class ConsumerSettings:
    """What a Consumer was given, with the defaults of its queue's config."""

    selection: JobSelection
    """The jobs that it serves."""
    worker: Callable[[], str]
    """Returns the name of the worker, as ``claimed_by`` and the log have it."""
    retry_policy: RetryPolicy
    lease: timedelta
    timeout: float | None
    batch: bool
    """The handler takes a list of jobs."""
    batch_size: int
    fixed_batch_size: bool
    """The caller has given ``batch_size``."""
    concurrency: int
    poll_interval: float
    grace: float
    schedules: Sequence[ScheduleGroup] = ()
    """The schedules that it fires."""
    distribution: Distribution | None = None
    """The shards that it serves in turn, of a distributed table."""
    dispatch: Dispatch | None = None
    """Calls the handler of a job's class, where each class has its own."""

    @property
    def spec(self) -> QueueSpec:
        """The queue."""
        return self.selection.spec

    @property
    def serves_whole_queue(self) -> bool:
        """Whether it serves every job of its queue, so that a claim without result means an empty queue."""
        return self.selection.entity is self.spec.model and self.selection.select.whereclause is None

    @property
    def bind_arguments(self) -> dict[str, Any]:
        """Which engine statements go to, in a session with several engines: some statements name no mapped class."""
        return {"mapper": self.spec.mapper}

    @property
    def holds_transaction(self) -> bool:
        """Whether claimed jobs belong to an open transaction."""
        return self.spec.strategy.holds_transaction

    @property
    def spec_of_shard(self) -> QueueSpec:
        """The queue, with the statements of one shard of a distributed table; its value is the parameter ``SHARD``."""
        if self.distribution is None:
            return self.spec
        attribute = self.distribution.attribute
        return self.spec.for_shard(attribute, sa.bindparam(SHARD, None, self.spec.mapper.columns[attribute].type))

    @property
    def notifies(self) -> bool:
        """Whether the queue's table sends notifications of new jobs."""
        return wakes(self.spec)

    @property
    def has_leases(self) -> bool:
        """Whether there are leases to extend and to rescue."""
        return not self.holds_transaction and self.spec.has("lease_expires_at")

    @property
    def has_flow_control(self) -> bool:
        """Whether limits, rates, an order or turns decide which jobs may begin."""
        return flow_control(self.spec) is not None

    @property
    def connections(self) -> int:
        """How many connections it may need at once: for each handler, for maintenance, and for schedules."""
        return self.concurrency + (2 if self.schedules else 1)

    def timeout_error(self) -> JobTimeout:
        """Return the error of a run whose handler has exceeded the timeout."""
        return JobTimeout(f"the handler ran for longer than {self.timeout:g} seconds")

    def call_groups(self, jobs: Sequence[Any]) -> list[list[Any]]:
        """Return claimed jobs in lists for one call of a handler each."""
        if not self.batch:
            return [[job] for job in jobs]
        if self.dispatch is not None:
            return self.dispatch.groups(jobs)
        return [list(jobs)] if jobs else []


def _namer(name: str | None) -> Callable[[], str]:
    """Return a function that returns the name of the worker, with the process that runs it by then."""
    if name is None:
        return worker_name
    if name != storable(name):
        msg = f"Consumer(name={name!r}): no database stores a NUL, or the half of a character; leave it out"
        raise ConfigurationError(msg)
    return lambda: f"{worker_name()}:{name}"


def make_settings(
    model: Any,
    *,
    handlers: Mapping[Any, Callable[..., Any]] | None,
    batch_size: int | None,
    concurrency: int,
    poll_interval: Delay,
    lease: Delay | None,
    timeout: Delay | None,
    grace: Delay,
    retry: RetryPolicy | None,
    name: str | None,
    batch: bool,
    schedules: Sequence[Any] = (),
    distribution: Distribution | None = None,
) -> ConsumerSettings:
    """Check and resolve the arguments of a Consumer.

    :param handlers: the handler of each class, where there are several.
    :raises ConfigurationError: for a value that no consumer can work with.
    :raises NotAQueueError: when ``model`` is no queue.
    :raises StatementError: when ``model`` is a select that cannot be claimed from.
    """
    for argument, number in (("concurrency", concurrency), ("batch_size", BATCH if batch_size is None else batch_size)):
        if not is_count(number):
            msg = f"Consumer({argument}={number!r}): give an integer from 1 on"
            raise ConfigurationError(msg)
    if retry is not None and not callable(retry):
        msg = f"Consumer(retry={retry!r}): give a policy such as sqlaqueue.Exponential(), or a callable"
        raise ConfigurationError(msg)
    selection = select_jobs(model, "Consumer")
    spec = selection.spec
    dispatch = None if handlers is None else Dispatch("Consumer", selection, handlers)
    if dispatch is not None:
        selection = selection._replace(select=dispatch.narrowed(selection.select))
    _check_states(spec)
    if distribution is not None:
        _check_distribution(spec, distribution)
    if lease is not None:
        check_lease(lease, "Consumer(lease=...)")
    if timeout is not None and seconds(timeout, "Consumer(timeout=...)") == 0:
        msg = f"Consumer(timeout={timeout!r}): a handler cannot end in zero seconds; give None for no limit"
        raise ConfigurationError(msg)
    interval = seconds(poll_interval, "Consumer(poll_interval=...)")
    if interval <= 0:
        msg = f"Consumer(poll_interval={poll_interval!r}): give more than zero seconds, or it polls without a pause"
        raise ConfigurationError(msg)

    return ConsumerSettings(
        selection=selection,
        worker=_namer(name),
        retry_policy=retry or spec.config.retry,
        lease=spec.lease if lease is None else timedelta(seconds=seconds(lease)),
        timeout=None if timeout is None else seconds(timeout),
        batch=batch,
        batch_size=batch_size or max(BATCH, concurrency),
        fixed_batch_size=batch_size is not None,
        concurrency=concurrency,
        poll_interval=interval,
        grace=seconds(grace, "Consumer(grace=...)"),
        schedules=schedule_groups(schedules, "Consumer"),
        dispatch=dispatch,
        distribution=distribution,
    )


def _check_distribution(spec: QueueSpec, distribution: Any) -> None:
    """Refuse shards of a table whose statements cannot be limited to one shard."""
    name = spec.model.__name__
    if not isinstance(distribution, Distribution):
        msg = f"Consumer(distribution={distribution!r}): give a sqlaqueue.Distribution, with an attribute and values"
        raise ConfigurationError(msg)
    attributes = [spec.mapper.get_property_by_column(column).key for column in spec.keys]
    if distribution.attribute not in attributes or len(attributes) == 1:
        msg = (
            f"Consumer(distribution=Distribution({distribution.attribute!r})): the attribute must be one of several "
            f"that make the primary key of {name}, which is {', '.join(attributes)}"
        )
        raise ConfigurationError(msg)
    refused = {
        f"strategy={spec.config.strategy!r}": spec.config.strategy != "update_status",
        "unique": spec.config.unique is not None,
        " and ".join(spec.flow_options): bool(spec.flow_options),
        "retention": bool(spec.config.retention),
        "attempt_history": spec.config.attempt_history is not None,
    }
    for option, used in refused.items():
        if used:
            instead = 'use strategy="update_status"' if option.startswith("strategy") else "leave it out"
            msg = (
                f"Consumer(distribution=...): {name} has {option} in its QueueConfig, which needs statements on "
                f"several shards of {spec.table.fullname}; {instead}"
            )
            raise ConfigurationError(msg)
    if not callable(distribution.values):
        distribution.check(spec.mapper.columns[distribution.attribute])


def _check_states(spec: QueueSpec) -> None:
    """Refuse a queue whose runs could end in a state for which its table has no value."""
    needed = {"failed": "a job ends that has spent its attempts"}
    if spec.config.on_complete == "keep":
        needed["completed"] = 'a job ends that succeeded; or delete such jobs with on_complete="delete"'
    for state, why in needed.items():
        if spec.has("status") and getattr(spec.config.states, state) is None:
            msg = (
                f"Consumer: {spec.model.__name__} has no value for the state {state!r}; give one in "
                f"QueueConfig(states=States({state}=...)), for how {why}"
            )
            raise ConfigurationError(msg)
