"""A plug-in for Alembic: autogenerate finds and writes everything that a queue has in a database.

One line in ``env.py`` sets it up::

    import sqlaqueue.alembic

Then ``alembic revision --autogenerate`` compares triggers, their functions, predicates of indexes, check constraints,
storage parameters and enum types of the queues in your models with the database, beside what Alembic compares itself.
It writes each difference as an operation such as ``op.create_queue_triggers(...)``, which works in any later version
of sqlaqueue and has a reverse, so that ``alembic downgrade`` restores the former schema. When a table with rows becomes
a queue, the migration contains ``existing_rows=...`` and does not run before you replace the three dots by the status
of these rows. For a large table that is in use, write the migration with ``alembic -x live=<table> revision
--autogenerate``: its steps then commit one by one and wait for their locks in short attempts.

The plug-in is named ``alembic.autogenerate.sqlaqueue``. Alembic includes it by default; an ``env.py`` that sets
``autogenerate_plugins`` must add that name.
"""

from __future__ import annotations

import sys

try:
    from alembic.runtime.plugins import Plugin
    from alembic.util import DispatchPriority
except ImportError as missing:
    msg = "sqlaqueue.alembic needs Alembic 1.19.2 or newer, which has plug-ins: pip install 'sqlaqueue[alembic]'"
    raise ImportError(msg) from missing

from sqlaqueue.alembic import mariadb_queues, sqlite_queues
from sqlaqueue.alembic.autogenerate import compare_queues, remember_table
from sqlaqueue.alembic.operations import (  # noqa: F401 - the imports register them with Alembic
    implementations,
    render,
    unique_index_builds,
)

__all__ = ["NAME", "setup"]

NAME = "alembic.autogenerate.sqlaqueue"
"""The name of the plug-in. Alembic includes all names that begin with ``alembic.autogenerate.`` by default."""


def setup(plugin: Plugin) -> None:
    """Add the comparisons to a plug-in; Alembic calls this."""
    plugin.add_autogenerate_comparator(
        remember_table, "table", "sqlaqueue", qualifier="postgresql", priority=DispatchPriority.LAST
    )
    plugin.add_autogenerate_comparator(
        compare_queues, "schema", "sqlaqueue", qualifier="postgresql", priority=DispatchPriority.LAST
    )
    plugin.add_autogenerate_comparator(
        sqlite_queues.compare_queues, "schema", "sqlaqueue", qualifier="sqlite", priority=DispatchPriority.LAST
    )
    for name in ("mariadb", "mysql"):
        plugin.add_autogenerate_comparator(
            mariadb_queues.refuse_queues, "schema", "sqlaqueue", qualifier=name, priority=DispatchPriority.FIRST
        )


Plugin.setup_plugin_from_module(sys.modules[__name__], NAME)
