"""Everything that only PostgreSQL has; the rest of the library reaches it through :mod:`sqlaqueue.queue.names`.

``claims`` scans the claim order, ``ddl`` creates triggers, ``side_tables`` defines the library's own tables, ``checks``
compares a database with its models, and ``catalog`` reads pg_catalog.
"""
