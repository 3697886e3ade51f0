"""The plug-in for Alembic: autogenerate sees everything that a queue has in a database.

One line in ``env.py`` sets it up::

    import sqlaqueue.alembic

From then on ``alembic revision --autogenerate`` and ``alembic check`` find message tables, triggers and their
functions, predicates of indexes, storage parameters and check constraints of queues, beside what Alembic finds by
itself, and write them as operations: ``op.create_queue_triggers(...)`` and its like, see
:mod:`sqlaqueue.alembic.operations`. A database without queues is left as it is.

The import registers the plug-in under the name ``alembic.autogenerate.sqlaqueue``, which is among those that Alembic
uses by default. An ``env.py`` that names ``autogenerate_plugins`` itself has to name that one as well.
"""

from __future__ import annotations

import sys

try:
    from alembic.runtime.plugins import Plugin
    from alembic.util import DispatchPriority
except ImportError as missing:
    msg = "sqlaqueue.alembic needs Alembic 1.19.2 or newer, which takes plug-ins: pip install 'sqlaqueue[alembic]'"
    raise ImportError(msg) from missing

from sqlaqueue.alembic import implement, render  # noqa: F401 - each registers what it has
from sqlaqueue.alembic.compare import compare_queues, remember_table

__all__ = ["NAME", "setup"]

NAME = "alembic.autogenerate.sqlaqueue"
"""The name of the plug-in. It begins like Alembic's own, which ``env.py`` includes without naming them."""


def setup(plugin: Plugin) -> None:
    """Add the comparisons to a plug-in; Alembic calls this."""
    plugin.add_autogenerate_comparator(
        remember_table, "table", "sqlaqueue", qualifier="postgresql", priority=DispatchPriority.LAST
    )
    plugin.add_autogenerate_comparator(
        compare_queues, "schema", "sqlaqueue", qualifier="postgresql", priority=DispatchPriority.LAST
    )


Plugin.setup_plugin_from_module(sys.modules[__name__], NAME)
