"""How the operations are written into a migration: the call that makes them, on as many lines as reading it takes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import _render_column, render_op, renderers

from sqlaqueue.alembic.operations import OneWay, QueueOp, Steps

IMPORT = "import sqlaqueue.alembic"
"""A migration with our operations must find them, whatever ``env.py`` has become."""

_WIDTH = 100
_INDENT = "    "


@renderers.dispatch_for(Steps)
@renderers.dispatch_for(OneWay)
def _render_steps(context: AutogenContext, steps: Steps | OneWay) -> list[str]:
    return [line for op in steps.ops for line in render_op(context, op)]


@renderers.dispatch_for(QueueOp)
def _render_call(context: AutogenContext, op: QueueOp) -> str:
    context.imports.add(IMPORT)
    prefix = context.opts["alembic_module_prefix"] or ""
    arguments = []
    for each in op.arguments():
        value = getattr(op, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if each.kw_only and default is not MISSING and value == default:
            continue
        text = render_value(context, value)
        arguments.append(f"{each.name}={text}" if each.kw_only else text)
    return f"{prefix}{op.name}({_bracketed(arguments)})"


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
        return f"{{{_bracketed(items)}}}"
    if isinstance(value, list):
        return f"[{_bracketed([render_value(context, each) for each in value])}]"
    if isinstance(value, tuple):
        return f"({_bracketed([render_value(context, each) for each in value])})"
    return repr(value)


def _bracketed(items: Sequence[str]) -> str:
    line = ", ".join(items)
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return "\n" + "".join(f"{textwrap.indent(item, _INDENT)},\n" for item in items)


def _render_text(text: str) -> str:
    if "\n" not in text:
        return repr(text)
    # Line by line: what indents a migration, Alembic first of all, must not indent the text itself.
    return "(\n" + "".join(f"{_INDENT}{line!r}\n" for line in text.splitlines(keepends=True)) + ")"
