"""What a start refuses about the places that Citus gives tables; tests/citus tests it on a cluster."""

from typing import Any

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import ConcurrencyLimit, QueueConfig, QueueMixin, Unique
from sqlaqueue.mapping.mixin import queue_spec
from sqlaqueue.postgresql.catalog import LOCAL, Placement
from sqlaqueue.postgresql.start_checks import reasons
from sqlaqueue.queue.spec import QueueSpec

pytestmark = pytest.mark.once

REFERENCE, SHARD = Placement("reference"), Placement("one shard", 7)
BY_TENANT = Placement("distributed", 7, "tenant")
PLAIN = {"sqlaqueue_control": REFERENCE, "sqlaqueue_consumer": LOCAL}
"""The places of the side tables of a distributed queue that Consumers can serve."""


def spec_of_queue(shard: str | None = None, **config: Any) -> QueueSpec:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(**{"notify": False, **config})
        tenant: Mapped[int] = mapped_column(primary_key=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    spec = queue_spec(Job)
    return spec if shard is None else spec.for_shard(shard, 1)


def found(spec: QueueSpec, mine: Placement, **others: Placement) -> list[str]:
    """Return the reasons against a queue with these places, all its other tables at that of its own."""
    tables = [spec.table, *spec.side_tables.values()]
    return list(reasons(spec, {table: others.get(table.name, mine) for table in tables}))


@pytest.mark.parametrize("place", [LOCAL, SHARD], ids=["local", "one shard"])
def test_tables_beside_each_other_are_served(place: Placement) -> None:
    assert found(spec_of_queue(), place) == []


def test_a_distributed_table_is_served_with_the_value_of_its_column() -> None:
    assert found(spec_of_queue("tenant"), BY_TENANT, **PLAIN) == []


@pytest.mark.parametrize(
    ("shard", "place", "text"),
    [
        (None, REFERENCE, "job is a reference table of Citus, of which each claim and each insert waits"),
        (None, BY_TENANT, "give the Consumer distribution=Distribution('tenant', values)"),
        ("id", BY_TENANT, "the Consumer has Distribution('id'); give it distribution=Distribution('tenant', values)"),
        ("tenant", Placement("distributed", 7, "customer"), "distribute it by one of several columns of the key"),
        ("tenant", LOCAL, "execute SELECT create_distributed_table('job', 'tenant'), or leave the argument out"),
        ("tenant", SHARD, "but job is not distributed by a column; leave the argument out"),
    ],
)
def test_a_place_where_claims_cannot_lock_rows_is_refused(shard: str | None, place: Placement, text: str) -> None:
    (reason,) = found(spec_of_queue(shard), place, **(PLAIN if place.kind in {"distributed", "reference"} else {}))
    assert text in reason


def test_a_table_with_triggers_has_to_lose_them_before_it_is_distributed() -> None:
    reasons_found = found(spec_of_queue("tenant", notify=True), LOCAL)
    assert any(
        "use QueueConfig(notify=False), migrate, as Citus distributes no table" in each for each in reasons_found
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"strategy": "batch_select"}, "where strategy='batch_select' cannot hold rows"),
        ({"statistics": True}, "of statistics in QueueConfig; leave it out"),
        ({"notify": True}, "of notify=True in QueueConfig; use notify=False, so that Consumers poll"),
        ({"unique": Unique("priority")}, "of unique in QueueConfig; leave it out"),
        ({"flow_control": [ConcurrencyLimit(1)]}, "of ConcurrencyLimit in QueueConfig; leave it out"),
    ],
)
@pytest.mark.parametrize("shard", [None, "tenant"], ids=["one shard", "distributed"])
def test_an_option_that_shards_do_not_carry_out_is_refused(
    config: dict[str, Any], text: str, shard: str | None
) -> None:
    place, others = (SHARD, {}) if shard is None else (BY_TENANT, PLAIN)
    spec = spec_of_queue(shard, **config)
    others = {table.name: LOCAL for table in spec.side_tables.values()} | others if others else {}
    assert any(text in each for each in found(spec, place, **others))


@pytest.mark.parametrize(
    ("name", "place", "text"),
    [
        (
            "sqlaqueue_control",
            LOCAL,
            "is a local table, but each claim reads it on the shard; execute SELECT create_ref",
        ),
        ("sqlaqueue_consumer", REFERENCE, "is a reference table, so that the heartbeats of all Consumers wait"),
        ("sqlaqueue_consumer", SHARD, "is on another shard, so that the heartbeats of all Consumers wait"),
        ("sqlaqueue_consumer", BY_TENANT, "is distributed by tenant, so that the heartbeats of all Consumers wait"),
    ],
)
def test_side_tables_of_a_distributed_table_have_one_place(name: str, place: Placement, text: str) -> None:
    (reason,) = found(spec_of_queue("tenant"), BY_TENANT, **{**PLAIN, name: place})
    assert f"{name} {text}" in reason


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (
            LOCAL,
            "is on another shard and job is a local table, so its statements would need several nodes; create both as",
        ),
        (Placement("one shard", 8), "is on another shard and job is on one shard"),
    ],
)
def test_tables_on_different_nodes_are_refused(mine: Placement, text: str) -> None:
    (reason,) = found(spec_of_queue(), mine, sqlaqueue_control=SHARD)
    assert f"sqlaqueue_control {text}" in reason
