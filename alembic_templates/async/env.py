"""Configures the migrations; Alembic runs this file for each of its commands."""

import asyncio
from logging.config import fileConfig

from alembic import context
from app import Base  # your models; import every module that defines some
from sqlalchemy import Connection, pool
from sqlalchemy.ext.asyncio import async_engine_from_config

import sqlaqueue.alembic  # adds queues to what autogenerate compares

config = context.config
if config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

options = {
    "target_metadata": Base.metadata,
    # A step on a live table commits at once, so each migration needs a transaction of its own.
    "transaction_per_migration": True,
}


def run_on(connection: Connection) -> None:
    """Run the migrations on a connection."""
    # SQLite changes a column or a constraint by copying the table.
    context.configure(connection=connection, render_as_batch=connection.dialect.name == "sqlite", **options)
    with context.begin_transaction():
        context.run_migrations()


async def run_online() -> None:
    """Connect, and run the migrations."""
    section = config.get_section(config.config_ini_section, {})
    engine = sqlaqueue.prepare(async_engine_from_config(section, prefix="sqlalchemy.", poolclass=pool.NullPool))
    async with engine.connect() as connection:
        await connection.run_sync(run_on)
    await engine.dispose()


if context.is_offline_mode():
    url = config.get_main_option("sqlalchemy.url")
    context.configure(url=url, literal_binds=True, dialect_opts={"paramstyle": "named"}, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    asyncio.run(run_online())
