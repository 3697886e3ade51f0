"""The queue of one round, drawn at random from a seed, and the mapped classes that it makes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, Fair, Limit, Order, QueueConfig, QueueMixin, Rate

LEASE = 1.5
"""Seconds of a lease: a worker that is paused for longer loses its jobs."""

PAYLOADS = ("ok", "ok", "ok", "flaky", "fails", "retry", "snooze", "throttle", "slow")
"""What a handler does; see :class:`tests.flow_control.faults.roles.Handler`."""


@dataclass(frozen=True)
class Configuration:
    """What a round runs; all of it can be written as JSON."""

    seed: int
    strategy: str = "update_status"
    """``update_status``, or one of :data:`HELD`."""
    limits: tuple[str, ...] = ()
    """Kinds of limits: ``number``, ``attribute`` and ``tenant`` for each customer, ``pair`` for each customer and
    kind, and ``queue``."""
    most: int = 2
    """The number of the limits ``number`` and ``pair``, and the first one of each tenant."""
    most_of_queue: int = 5
    rates: tuple[tuple[int, float, str | None, int], ...] = ()
    """For each rate: how many, in how many seconds, the attribute of its key, and the burst."""
    order: str | None = None
    """The ``on_failure`` of the order of each document; None for no order."""
    fair: int | None = None
    """The weight of the turns of customers; None for no turns."""
    priorities: bool = False
    notify: bool = True
    poll_interval: float = 0.3
    customers: int = 3
    documents: int = 10
    jobs: int = 200
    work: float = 0.01
    """The longest time that most handlers take, in seconds."""
    workers: tuple[tuple[str, int, int | None, float | None], ...] = (("sync", 2, None, None), ("async", 4, None, None))
    """For each worker: its API, its concurrency, its batch size, and its timeout."""
    seconds: float = 2.0
    """For how long faults are injected."""
    faults: tuple[str, ...] = ()
    """The kinds of faults of the processes and connections, see :mod:`tests.flow_control.faults.a_round`."""
    actions: tuple[str, ...] = ()
    """What operators do, see :data:`tests.flow_control.faults.operators.ACTIONS`."""
    mutant: str | None = None
    """The safeguard that is removed, see :mod:`tests.flow_control.faults.mutants`."""
    payloads: tuple[str, ...] = field(default=PAYLOADS)

    def __str__(self) -> str:
        """Return what differs from the defaults, without the lists of faults."""
        fields = self.__dataclass_fields__.values()
        shown = [one for one in fields if one.name not in {"seed", "faults", "actions", "payloads"}]
        changed = [one.name for one in shown if getattr(self, one.name) != one.default]
        return " ".join(f"{name}={getattr(self, name)!r}" for name in changed)


HELD = ("batch_select", "delete_returning", "delete_row")
"""The strategies whose transaction holds the jobs; ``delete_row`` is the one with rows as messages."""

FAULTS = ("kill", "pause", "terminate", "stop")
ACTIONS = ("cancel", "requeue", "purge", "settle", "delete", "claim", "abandon", "limit", "pause", "lock")


def strategy_of(seed: int) -> str:
    """Return the strategy of a seed: even ones have ``update_status``."""
    return HELD[seed // 2 % 3] if seed % 2 else "update_status"


def draw(seed: int) -> Configuration:
    """Return the configuration of a seed."""
    found = _draw(seed)
    if seed % 2 == 0:
        return found
    # No other transaction sees that such a job runs, and no lease ends.
    without = {"settle", "abandon"} if strategy_of(seed) == "delete_row" else {"abandon"}
    if found.rates:
        without.add("claim")  # it is refused
    if found.poll_interval > 60:
        without |= {"claim", "lock"}  # a rollback notifies nobody
    return replace(
        found,
        strategy=strategy_of(seed),
        order="continue" if found.order is not None and strategy_of(seed) == "delete_row" else found.order,
        actions=tuple(name for name in found.actions if name not in without),
    )


def _draw(seed: int) -> Configuration:
    rng = random.Random(seed)
    features = rng.sample(
        ["limit", "limit", "limit", "rate", "order", "order", "fair", "queue"], rng.choice([1, 2, 2, 3, 4])
    )
    # Two limits of the same key are refused.
    kinds = rng.sample([rng.choice(["number", "attribute", "tenant"]), "pair"], min(2, features.count("limit")))
    limits = kinds + ["queue"] * ("queue" in features)
    per, burst = rng.choice(["customer_id", "customer_id", None]), rng.choice([1, 3, 10])
    rate = (rng.choice([20, 40]) if per else rng.choice([80, 150]), 1.0, per, burst)
    # Of the same key, so that a throttle holds both back.
    rates = (rate, (5 * rate[0], 10.0, per, 3 * burst)) if rng.random() < 0.3 else (rate,)
    # A wait for a poll of this length would be seen as a stall: all wakeups have to come by notifications.
    only_notified = rng.random() < 0.2
    few = rng.random() < 0.5
    slowest = rng.choice([0.002, 0.01, 0.03])
    return Configuration(
        seed,
        limits=tuple(limits),
        most=rng.choice([1, 1, 2, 3, 8]),
        most_of_queue=rng.choice([1, 3, 8]),
        rates=rates if "rate" in features else (),
        order=rng.choice(["block", "continue", "cancel"]) if "order" in features else None,
        fair=rng.choice([1, 1, 3]) if "fair" in features else None,
        priorities=rng.random() < 0.4,
        notify=only_notified or rng.random() < 0.7,
        poll_interval=600.0 if only_notified else rng.choice([0.1, 0.3, 1.0]),
        customers=rng.choice([1, 3, 5]) if few else rng.choice([40, 150]),
        documents=rng.choice([2, 6]) if few else rng.choice([40, 300]),
        jobs=rng.choice([150, 250, 400]) if few else rng.choice([300, 600, 1200]),
        work=slowest,
        workers=tuple(_worker(rng) for _ in range(rng.randint(2, 4))),
        seconds=rng.uniform(2, 5),
        faults=() if only_notified else tuple(sorted(rng.sample(FAULTS, rng.randint(0, len(FAULTS))))),
        # Only a poll notices a raised limit, and a rescue needs a poll where no worker knows of the lease.
        actions=tuple(
            name
            for name in sorted(rng.sample(ACTIONS, rng.randint(0, len(ACTIONS))))
            if not only_notified or name not in {"limit", "abandon"}
        ),
    )


def _worker(rng: random.Random) -> tuple[str, int, int | None, float | None]:
    batch_size, timeout = rng.choice([None, None, 1, 5]), rng.choice([None, None, 0.3])
    return rng.choice(["sync", "async"]), rng.randint(1, 6), batch_size, timeout


class Models(NamedTuple):
    """The mapped classes of a round."""

    base: type[DeclarativeBase]
    job: Any
    tenant: Any
    effect: Any


@cache
def models(configuration: Configuration) -> Models:
    """Return the mapped classes of a configuration."""

    class Base(DeclarativeBase):
        pass

    class Tenant(Base):
        __tablename__ = "tenant"
        id: Mapped[int] = mapped_column(primary_key=True)
        most: Mapped[int | None]

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = _config(configuration, Tenant)
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[int | None]
        kind: Mapped[str]
        document_id: Mapped[int | None]
        most: Mapped[int | None]
        payload: Mapped[str]

    class Effect(Base):
        __tablename__ = "effect"
        id: Mapped[int] = mapped_column(primary_key=True)
        job: Mapped[int]
        token: Mapped[str]
        xid: Mapped[int] = mapped_column(sa.BigInteger, server_default=sa.text("pg_current_xact_id()::text::bigint"))

    return Models(Base, Job, Tenant, Effect)


def _config(configuration: Configuration, tenant: Any) -> QueueConfig:
    limits = {
        "number": Limit(configuration.most, per="customer_id"),
        "attribute": Limit("most", per="customer_id"),
        "tenant": Limit(lambda job: sa.select(tenant.most).where(tenant.id == job.customer_id), per="customer_id"),
        "queue": Limit(configuration.most_of_queue),
        "pair": Limit(configuration.most, per=("customer_id", "kind")),
    }
    rows_are_messages = configuration.strategy == "delete_row"
    return QueueConfig(
        limits=[limits[kind] for kind in configuration.limits],
        rates=[Rate(most, every=every, per=per, burst=burst) for most, every, per, burst in configuration.rates],
        order=None if configuration.order is None else Order("document_id", on_failure=configuration.order),
        fair=None if configuration.fair is None else Fair("customer_id", weight=configuration.fair),
        strategy="delete_returning" if rows_are_messages else configuration.strategy,
        rows_are_messages=rows_are_messages,
        columns={"started_at": "started_at"} | ({"status": None} if rows_are_messages else {}),
        notify=configuration.notify,
        lease=LEASE,
        max_attempts=3,
        retry=Constant(delay=0.05),
    )
