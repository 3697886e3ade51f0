"""What programs do with the jobs of the model: the statements, and the programs that the searches are made of."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["absent", "waiting", "pending", "processing", "completed", "failed", "cancelled"]
READY: frozenset[Status] = frozenset({"waiting", "pending"})
"""The states of a row that has not begun."""
ENDED: frozenset[Status] = frozenset({"completed", "failed", "cancelled"})
FAILED: frozenset[Status] = frozenset({"failed", "cancelled"})
SETTLEABLE: frozenset[Status] = frozenset({"pending", "processing"})
"""A row that is not claimed in the model is settled while it is pending."""


class Insert(NamedTuple):
    row: int
    links: tuple[int, ...]
    is_open: bool = False


class SetStatus(NamedTuple):
    """Update the status, if it is one of those given."""

    row: int
    old: frozenset[Status]
    new: Status


class Claim(NamedTuple):
    """Lock a pending row for as long as its handler runs: the transaction is the claim."""

    row: int


class Link(NamedTuple):
    """Give a row another foreign key: another parent, another batch, or none (-1)."""

    row: int
    relation: int
    target: int


class SetOpen(NamedTuple):
    row: int
    is_open: bool


class Delete(NamedTuple):
    """Delete a row; those that wait for it in a to-one relation lose it: ON DELETE SET NULL."""

    row: int


class Reconcile(NamedTuple):
    row: int


Statement = Insert | SetStatus | Claim | Link | SetOpen | Delete | Reconcile


class Program(NamedTuple):
    name: str
    statements: tuple[Statement, ...]


def insert(row: int, *links: int, is_open: bool = False) -> Program:
    return Program(f"insert {row}", (Insert(row, links, is_open),))


def complete(*rows: int) -> list[Program]:
    return [_set(f"complete {row}", row, SETTLEABLE, "completed") for row in rows]


def fail(*rows: int) -> list[Program]:
    return [_set(f"fail {row}", row, SETTLEABLE, "failed") for row in rows]


def retry(*rows: int) -> list[Program]:
    """Return the programs that give claimed rows back: retries, and rescues, which do the same here."""
    return [_set(f"retry {row}", row, frozenset({"processing"}), "pending") for row in rows]


def requeue(*rows: int) -> list[Program]:
    return [_set(f"requeue {row}", row, ENDED, "pending") for row in rows]


def cancel(*rows: int) -> list[Program]:
    return [_set(f"cancel {row}", row, READY, "cancelled") for row in rows]


def _set(name: str, row: int, old: frozenset[Status], new: Status) -> Program:
    return Program(name, (SetStatus(row, old, new),))


def run(*rows: int) -> list[Program]:
    """Return the programs that claim rows and hold the transaction; they roll back when the handler crashes."""
    return [Program(f"run {row}", (Claim(row), SetStatus(row, frozenset({"pending"}), "completed"))) for row in rows]


def delete(*rows: int) -> list[Program]:
    return [Program(f"delete {row}", (Delete(row),)) for row in rows]


def reconcile(*rows: int) -> list[Program]:
    return [Program(f"reconcile {row}", (Reconcile(row),)) for row in rows]


def link(row: int, relation: int, target: int) -> Program:
    return Program(f"link {row} to {target if target >= 0 else 'none'}", (Link(row, relation, target),))


def close(row: int) -> Program:
    return Program(f"close {row}", (SetOpen(row, is_open=False),))


def reopen(row: int) -> Program:
    return Program(f"reopen {row}", (SetOpen(row, is_open=True),))


def together(*programs: Program) -> Program:
    """Return a program that does all of it in one transaction."""
    statements = tuple(statement for program in programs for statement in program.statements)
    return Program(", ".join(program.name for program in programs), statements)
