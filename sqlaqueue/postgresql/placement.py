"""Whether Citus places the tables of a queue where its Consumers can serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog import Placement, placements
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.spec import QueueSpec


def misplaced(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return why no Consumer can serve a queue in a database with Citus, and what to do; None if one can.

    :param spec: the queue; of a distributed table with the shard that its statements are limited to.
    """
    tables = [spec.table, *spec.side_tables.values()]
    found = dict(zip(tables, placements(session, tables), strict=True))
    reason = next(reasons(spec, found), None)
    return None if reason is None else f"{spec.model.__name__}: {reason}"


def reasons(spec: QueueSpec, found: Mapping[sa.Table, Placement]) -> Iterator[str]:
    """Yield why no Consumer can serve a queue whose tables are placed so."""
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
            yield _not_distributed(spec, spec.shard[0], mine)
        if mine.kind == "one shard":
            yield from _on_shards(spec, table)
        for other, placement in found.items():
            if (placement.kind, placement.colocation) != (mine.kind, mine.colocation):
                where = "a local table" if mine.kind == "local" else "on one shard"
                yield (
                    f"{other.fullname} is {_text(placement)} and {table} is {where}, so its statements would need "
                    f"several nodes; create both {'as local tables' if mine.kind == 'local' else 'in one schema'}"
                )


def _not_distributed(spec: QueueSpec, column: sa.Column[Any], mine: Placement) -> str:
    table, given, first = spec.table.fullname, _attribute(spec, column), ""
    if mine.kind == "local":
        first = f"execute SELECT create_distributed_table('{table}', '{column.name}'), or "
        if spec.config.notify:
            first = f"use QueueConfig(notify=False), migrate, as Citus distributes no table with triggers, and {first}"
    return (
        f"the Consumer has distribution=Distribution({given!r}), but {table} is not distributed by a column; "
        f"{first}leave the argument out"
    )


def _attribute(spec: QueueSpec, column: sa.Column[Any]) -> str:
    name: str = spec.mapper.get_property_by_column(column).key
    return name


def _text(placement: Placement) -> str:
    return {
        "local": "a local table",
        "reference": "a reference table",
        "one shard": "on another shard",
        "distributed": f"distributed by {placement.column}",
    }[placement.kind]


def _of_columns(spec: QueueSpec, mine: Placement) -> Iterator[str]:
    column, table = mine.column, spec.table.fullname
    key = next((key for key in spec.keys if key.name == column), None)
    if key is None or len(spec.keys) == 1:
        keys = ", ".join(key.name for key in spec.keys)
        yield (
            f"{table} is distributed by {column}, and its key is {keys}; distribute it by one of several columns of "
            "the key, so that the jobs with one value are on one shard"
        )
    elif spec.shard is None:
        yield (
            f"{table} is distributed by {column}, and Citus locks rows on one shard only; give the Consumer "
            f"distribution=Distribution({_attribute(spec, key)!r}, values), with the values to serve"
        )
    elif spec.shard[0] is not key:
        given = spec.shard[0]
        yield (
            f"{table} is distributed by {column}, but the Consumer has Distribution({_attribute(spec, given)!r}); give "
            f"it distribution=Distribution({_attribute(spec, key)!r}, values), with the values to serve, or execute "
            f"SELECT alter_distributed_table('{table}', distribution_column := '{given.name}')"
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
        " and ".join(spec.flow_rules): bool(spec.flow_rules),
        "attempt_history": config.attempt_history is not None,
        "waits_for": bool(config.waits),
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
