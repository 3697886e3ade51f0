"""How operations are written into a migration: as a call of ``op``, with long arguments on lines of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import _render_column, render_op, renderers

from sqlaqueue.alembic.operations.base import OperationList, PerDirection, QueueOp

IMPORT = "import sqlaqueue.alembic"
"""Written into each migration with such operations: it must run even if ``env.py`` no longer has the import."""

_WIDTH = 100
_INDENT = "    "


@renderers.dispatch_for(OperationList)
@renderers.dispatch_for(PerDirection)
def _render_container(context: AutogenContext, container: OperationList | PerDirection) -> list[str]:
    return [line for op in container.ops for line in render_op(context, op)]


@renderers.dispatch_for(QueueOp)
def _render_call(context: AutogenContext, op: QueueOp) -> str:
    context.imports.add(IMPORT)
    prefix = context.opts["alembic_module_prefix"] or ""
    arguments = []
    for each in op.rendered_fields():
        value = getattr(op, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if each.kw_only and default is not MISSING and value == default:
            continue
        text = render_value(context, value)
        arguments.append(f"{each.name}={text}" if each.kw_only else text)
    return f"{prefix}{op.name}({_join(arguments)})"


def render_value(context: AutogenContext, value: Any) -> str:  # noqa: PLR0911 - one for each kind of value
    """Return a value as Python source."""
    if value is ...:
        return "..."
    if isinstance(value, str):
        return _render_text(str(value))
    if isinstance(value, sa.Column):
        return str(_render_column(value, context))
    if isinstance(value, sa.TextClause):
        return f"{context.opts['sqlalchemy_module_prefix'] or ''}text({value.text!r})"
    if isinstance(value, dict):
        items = [f"{render_value(context, key)}: {render_value(context, each)}" for key, each in value.items()]
        return f"{{{_join(items)}}}"
    if isinstance(value, list):
        return f"[{_join([render_value(context, each) for each in value])}]"
    if isinstance(value, tuple):
        return f"({_join([render_value(context, each) for each in value])})"
    return repr(value)


def _join(items: Sequence[str]) -> str:
    """Return items on one line, or on lines of their own if they are too long for one."""
    line = ", ".join(items)
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return "\n" + "".join(f"{textwrap.indent(item, _INDENT)},\n" for item in items)


def _render_text(text: str) -> str:
    if "\n" not in text:
        return repr(text)
    # One literal a line: Alembic indents the lines of a migration, which must not change the text itself.
    return "(\n" + "".join(f"{_INDENT}{line!r}\n" for line in text.splitlines(keepends=True)) + ")"
