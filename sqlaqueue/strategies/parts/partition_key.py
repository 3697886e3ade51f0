"""Checks of a queue's table that is partitioned by ``postgresql_partition_by``, when a class is mapped.

PostgreSQL refuses an index that makes rows unique without the partition key, but only when the table is created. It
accepts a partition key that the queue changes; each such change then moves the row to another partition, and a claim
that meets the row at that moment ends with a serialization failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.config import did_you_mean
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies.parts.unique_key import unique_key

_UNCHANGED_ROLES = ("priority", "created_at", "max_attempts")
"""The roles that the library does not change while a job is in the queue."""

_COLUMN = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([A-Za-z_][\w$]*))\s*(?:$|\s[^(]*$)')
"""A column of a partition key, with its collation and operator class, if any."""


def check_partition_key(spec: QueueSpec) -> None:
    """Refuse a partition key by which the queue cannot work, or with which PostgreSQL would not create the table.

    :raises ConfigurationError: with the class, the attribute and the fix.
    """
    text = spec.table.dialect_options["postgresql"]["partition_by"]
    if text:
        for reason in _reasons_against(spec, str(text)):
            msg = f"{spec.model.__name__}: postgresql_partition_by={str(text)!r}: {reason}"
            raise ConfigurationError(msg)


def _reasons_against(spec: QueueSpec, text: str) -> Iterator[str]:
    columns: list[sa.Column[Any]] = []
    has_expression = False
    for part in _parts(text):
        match = _COLUMN.match(part)
        if match is None:
            has_expression = True
            continue
        # The server folds a name without quotes to lower case.
        name = match[1].replace('""', '"') if match[1] else match[2].lower()
        column = next((each for each in spec.table.columns if each.name == name), None)
        if column is None:
            hint = did_you_mean(name, [each.name for each in spec.table.columns])
            yield f"the table {spec.table.name} has no column {name!r}{hint}"
        else:
            columns.append(column)
    yield from _reasons_against_change(spec, columns)
    yield from _reasons_against_keys(spec, columns, has_expression=has_expression)


def _reasons_against_change(spec: QueueSpec, columns: list[sa.Column[Any]]) -> Iterator[str]:
    """Yield which columns of the partition key the queue changes."""
    for role, column in spec.columns.items():
        if role not in _UNCHANGED_ROLES and column in columns:
            yield (
                f"{_attribute(spec, column)} is the {role} of the queue, which changes while a job is in it. Each "
                "change would move the row to another partition, and a claim that meets it fails with a serialization "
                "failure; partition by a column that does not change, such as the created_at"
            )


def _reasons_against_keys(spec: QueueSpec, columns: list[sa.Column[Any]], *, has_expression: bool) -> Iterator[str]:
    """Yield why PostgreSQL would refuse the primary key, or the index of unique jobs."""
    unique, key = unique_key(spec), spec.table.primary_key.columns
    if has_expression and (key or unique is not None):
        what = "a primary key" if key else "QueueConfig(unique=...)"
        yield (
            f"the partition key has an expression, and PostgreSQL then allows no {what.removeprefix('a ')}; partition "
            "by columns, for instance by a generated column or one of type date"
        )
    missing = [_attribute(spec, column) for column in columns if key and column not in key.values()]
    if missing:
        yield (
            f"the primary key of a partitioned table has to contain its partition key, and lacks {', '.join(missing)}; "
            "declare primary_key=True there as well"
        )
    if unique is None:
        return
    missing = [_attribute(spec, column) for column in columns if column not in unique.columns]
    if missing:
        given = ", ".join(map(repr, unique.config.attributes))
        yield (
            f"QueueConfig(unique=Unique({given}, ...)): jobs of a partitioned table can be unique only within a "
            f"partition, so the attributes have to contain the partition key; add {', '.join(missing)}, if jobs may be "
            "equal otherwise, or partition by one of the attributes"
        )


def _attribute(spec: QueueSpec, column: sa.Column[Any]) -> str:
    """Return the name of a column's attribute, with the class."""
    return f"{spec.model.__name__}.{spec.mapper.get_property_by_column(column).key}"


def _parts(text: str) -> list[str]:
    """Return the parts of a partition key, which commas outside of parentheses and quotes separate."""
    inner = text.partition("(")[2].rpartition(")")[0]
    parts, depth, quote = [""], 0, ""
    for character in inner:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += character
    return parts
