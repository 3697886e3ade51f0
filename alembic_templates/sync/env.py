"""Configures the migrations; Alembic runs this file for each of its commands."""

from logging.config import fileConfig

from alembic import context
from app import Base  # your models; import every module that defines some
from sqlalchemy import engine_from_config, pool

import sqlaqueue.alembic  # adds queues to what autogenerate compares

config = context.config
if config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

options = {
    "target_metadata": Base.metadata,
    # A step on a live table commits at once, so each migration needs a transaction of its own.
    "transaction_per_migration": True,
}

if context.is_offline_mode():
    url = config.get_main_option("sqlalchemy.url")
    context.configure(url=url, literal_binds=True, dialect_opts={"paramstyle": "named"}, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    section = config.get_section(config.config_ini_section, {})
    engine = sqlaqueue.prepare(engine_from_config(section, prefix="sqlalchemy.", poolclass=pool.NullPool))
    with engine.connect() as connection:
        # SQLite changes a column or a constraint by copying the table.
        context.configure(connection=connection, render_as_batch=connection.dialect.name == "sqlite", **options)
        with context.begin_transaction():
            context.run_migrations()
