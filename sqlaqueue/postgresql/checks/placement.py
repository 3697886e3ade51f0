"""Whether Citus places the tables of a queue where its Consumers can serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.flow_control.controls import flow_control
from sqlaqueue.postgresql.catalog.citus import Placement, placements
from sqlaqueue.queue.backend import CONTROL
from sqlaqueue.queue.spec import QueueSpec


def misplaced(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return why no Consumer can serve a queue in a database with Citus, and what to do; None if one can.

    :param spec: the queue; of a distributed table with the shard that its statements are limited to.
    """
    tables = [spec.table, *spec.side_tables.values()]
    found = dict(zip(tables, placements(session, tables), strict=True))
    reason = next(_reasons(spec, found), None)
    return None if reason is None else f"{spec.model.__name__}: {reason}"


def _reasons(spec: QueueSpec, found: Mapping[sa.Table, Placement]) -> Iterator[str]:
    table, mine = spec.table.fullname, found[spec.table]
    if mine.kind == "reference":
        yield (
            f"{table} is a reference table of Citus, of which each claim and each insert waits for every other one; "
            f"create it again as a local table, in a distributed schema, or distributed by a column of its key"
        )
    elif mine.kind == "distributed":
        yield from _of_columns(spec, mine)
        yield from _on_shards(spec, table)
        yield from _beside_distributed(spec, found)
    else:
        if spec.shard is not None:
            yield (
                f"the Consumer has distribution=Distribution({spec.shard[0].key!r}), but {table} is not distributed by "
                "a column; leave the argument out"
            )
        if mine.kind == "one shard":
            yield from _on_shards(spec, table)
        for other, placement in found.items():
            if (placement.kind, placement.colocation) != (mine.kind, mine.colocation):
                where = "a local table" if mine.kind == "local" else "on one shard"
                yield (
                    f"{other.fullname} is {_text(placement)} and {table} is {where}, so its statements would need "
                    f"several nodes; create both {'as local tables' if mine.kind == 'local' else 'in one schema'}"
                )


def _text(placement: Placement) -> str:
    texts = {
        "local": "a local table",
        "reference": "a reference table",
        "one shard": "on another shard",
        "distributed": f"distributed by {placement.column}",
    }
    return texts[placement.kind]


def _of_columns(spec: QueueSpec, mine: Placement) -> Iterator[str]:
    column, table = mine.column, spec.table.fullname
    if column not in {key.name for key in spec.keys} or len(spec.keys) == 1:
        keys = ", ".join(key.name for key in spec.keys)
        yield (
            f"{table} is distributed by {column}, and its key is {keys}; distribute it by one of several columns of "
            "the key, so that the jobs with one value are on one shard"
        )
    if spec.shard is None or spec.shard[0].name != column:
        yield (
            f"{table} is distributed by {column}, and Citus locks rows on one shard only; give the Consumer "
            f"distribution=Distribution({column!r}, values), with the values to serve"
        )


def _on_shards(spec: QueueSpec, table: str) -> Iterator[str]:
    """Yield what the config of a queue on shards must not have."""
    config = spec.config
    if config.strategy != "update_status":
        yield (
            f"{table} is on shards of Citus, where strategy={config.strategy!r} cannot hold rows in a transaction; use "
            'strategy="update_status"'
        )
    refused = {
        "notify=True": config.notify,
        "unique": config.unique is not None,
        "limits, rates, order or fair": flow_control(spec) is not None,
        "attempt_history": config.attempt_history is not None,
    }
    for option, is_used in refused.items():
        if is_used:
            instead = "use notify=False, so that Consumers poll" if option == "notify=True" else "leave it out"
            yield (
                f"{table} is on shards of Citus, which carries out neither the triggers nor the statements of {option} "
                f"in QueueConfig; {instead}, or create it as a local table"
            )


def _beside_distributed(spec: QueueSpec, found: Mapping[sa.Table, Placement]) -> Iterator[str]:
    for other, placement in found.items():
        name = other.fullname
        if other.name == CONTROL and placement.kind != "reference":
            yield (
                f"{name} is {_text(placement)}, but each claim reads it on the shard; execute "
                f"SELECT create_reference_table('{name}')"
            )
        elif other is not spec.table and other.name != CONTROL and placement.kind != "local":
            yield (
                f"{name} is {_text(placement)}, so that the heartbeats of all Consumers wait for each other or for "
                f"every node; execute SELECT undistribute_table('{name}')"
            )
