"""The base of all operations, and the containers that give a downgrade other operations than the reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, TypeVar

from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import OpContainer

Q = TypeVar("Q", bound="QueueOp")

NOT_RENDERED = {"not_rendered": True}
"""Metadata of a dataclass field that only :meth:`QueueOp.reverse` needs: it is not written into migrations."""


class QueueOp(MigrateOperation):
    """Base of the operations: a dataclass whose fields are the arguments of ``op.<name>()``."""

    name: ClassVar[str]

    @classmethod
    def invoke(cls, operations: Operations, *args: Any, **kw: Any) -> Any:
        """Run the operation; ``op.<name>(...)`` calls this."""
        return operations.invoke(cls(*args, **kw))

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return the difference that ``alembic check`` prints."""
        return (self.name, *(getattr(self, each.name) for each in self.rendered_fields()))

    @classmethod
    def rendered_fields(cls) -> list[Field[Any]]:
        """Return the fields that are written into migrations."""
        return [each for each in fields(cls) if not each.metadata.get("not_rendered")]  # type: ignore[arg-type] # every subclass is a dataclass


def registered_as(name: str) -> Callable[[type[Q]], type[Q]]:
    """Register an operation as ``op.<name>``."""

    def register(cls: type[Q]) -> type[Q]:
        cls.name = name
        return Operations.register_operation(name, "invoke")(cls)

    return register


class OperationList(OpContainer):
    """Several operations in place of one."""

    def reverse(self) -> OperationList:
        """Return the reverse of each operation, last first."""
        return OperationList([op.reverse() for op in reversed(self.ops)])


class PerDirection(OpContainer):
    """Operations of the upgrade and others of the downgrade, which do not undo each other."""

    def __init__(self, up: Sequence[MigrateOperation] = (), down: Sequence[MigrateOperation] = ()) -> None:
        super().__init__(up)
        self.down = down

    def reverse(self) -> PerDirection:
        """Return the operations with both directions exchanged."""
        return PerDirection(self.down, self.ops)
