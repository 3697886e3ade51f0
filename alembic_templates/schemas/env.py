"""Configures the migrations; Alembic runs this file for each of its commands."""

from logging.config import fileConfig

from alembic import context
from app import Base  # your models; import every module that defines some
from sqlalchemy import engine_from_config, pool
from sqlalchemy.schema import CreateSchema

import sqlaqueue.alembic  # noqa: F401 - adds queues to what autogenerate compares

config = context.config
if config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

schemas = {table.schema for table in Base.metadata.tables.values()}


def include_name(name: str | None, kind: str, _: object) -> bool:
    """Compare the schemas of the models only."""
    return kind != "schema" or name in schemas


options = {
    "target_metadata": Base.metadata,
    "include_schemas": True,
    "include_name": include_name,
    # A step on a live table commits at once, so each migration needs a transaction of its own.
    "transaction_per_migration": True,
}
creations = [CreateSchema(schema, if_not_exists=True) for schema in sorted(filter(None, schemas))]

if context.is_offline_mode():
    url = config.get_main_option("sqlalchemy.url")
    context.configure(url=url, literal_binds=True, dialect_opts={"paramstyle": "named"}, **options)
    for creation in creations:
        context.execute(creation)
    with context.begin_transaction():
        context.run_migrations()
else:
    section = config.get_section(config.config_ini_section, {})
    engine = engine_from_config(section, prefix="sqlalchemy.", poolclass=pool.NullPool)
    with engine.connect() as connection:
        with connection.begin():
            for creation in creations:
                connection.execute(creation)
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
