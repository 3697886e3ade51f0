"""Runs the migrations. SQLAQUEUE_URL names the database, as for every process of the shop."""

from alembic import context
from shop.queues import Base, engine

import sqlaqueue.alembic  # noqa: F401 - its import adds queues to what autogenerate compares

with engine.connect() as connection:
    # A step on a live table commits at once, so each migration needs a transaction of its own.
    context.configure(connection=connection, target_metadata=Base.metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
