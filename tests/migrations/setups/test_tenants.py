"""A schema for each tenant, selected by the search path or by schema_translate_map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, complete
from tests.migrations.project import Project, dump

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Database

ENV = """\
from alembic import context
from sqlalchemy import NullPool, create_engine

import sqlaqueue.alembic

options = context.config.attributes["options"]
tenant = options["tenant"]
engine = create_engine(context.config.attributes["url"], poolclass=NullPool)
with engine.connect() as connection:
    if options["by"] == "map":
        connection = connection.execution_options(schema_translate_map={None: tenant})
    else:
        path = f'"{tenant}"' + (", public" if options["by"] == "path before public" else "")
        connection.exec_driver_sql(f"SET search_path TO {path}")
        connection.commit()
    if options["by"] == "name of the default":
        connection.dialect.default_schema_name = tenant
    context.configure(
        connection=connection,
        target_metadata=context.config.attributes["metadata"],
        version_table_schema=tenant if options["by"] == "map" else None,
        include_schemas=options["by"] == "name of the default",
        include_name=lambda name, kind, _: name not in ("shared", "public", "one", "Tenant 2"),
    )
    with context.begin_transaction():
        context.run_migrations()
"""
STATES = ("pending", "processing", "completed", "failed", "cancelled")
TENANTS = ("one", "Tenant 2")


def job(strategy: str, **config: Any) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy, columns={"status": "status"}, **config)

        id = mapped_column(sa.Integer, primary_key=True)
        task = mapped_column(sa.Text)
        status = mapped_column(sa.Enum(*STATES, name="state"), nullable=False, server_default="pending")

    return Job


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    with database.connect() as connection:
        for tenant in TENANTS:
            connection.execute(f'CREATE SCHEMA "{tenant}"'.encode())
        connection.execute("CREATE TABLE shared (id int)")
    project = Project(directory=tmp_path, database=database, metadata=sa.MetaData())
    (tmp_path / "env.py").write_text(ENV)
    return project


def run_one_job(database: Database, model: type[Any], tenant: str) -> None:
    engine = sa.create_engine(database.url(), execution_options={"schema_translate_map": {None: tenant}})
    with Session(engine) as session:
        session.add(model(task=tenant))
        session.commit()
        jobs = session.scalars(claim(model, 5)).all()
        assert [job.task for job in jobs] == [tenant]
        session.execute(complete(jobs))
        session.commit()
    engine.dispose()


def create_tables(database: Database, metadata: sa.MetaData, tenant: str) -> None:
    engine = sa.create_engine(database.url())
    with engine.begin() as connection:
        metadata.create_all(connection.execution_options(schema_translate_map={None: tenant}))
    engine.dispose()


# delete_returning has everything that update_status has in a database, except for the index of leases.
both = pytest.mark.parametrize(
    "strategy", [pytest.param("update_status", marks=pytest.mark.thorough), "delete_returning"]
)


@both
@pytest.mark.parametrize(
    "by", ["path", "path before public", pytest.param("name of the default", marks=pytest.mark.thorough)]
)
def test_migrations_by_the_search_path(database: Database, project: Project, strategy: str, by: str) -> None:
    model = job(strategy)
    project.metadata = model.metadata
    empty = dump(database)
    project.options = {"tenant": TENANTS[0], "by": by}
    project.revise()
    for tenant in TENANTS:
        project.options["tenant"] = tenant
        project.upgrade()
        project.check()
        run_one_job(database, model, tenant)
    # A change by hand in one tenant is repaired; the other tenant is not touched.
    with database.connect() as connection:
        connection.execute('ALTER TABLE "Tenant 2".job DISABLE TRIGGER ALL')
    text = project.revise()
    assert "Tenant 2" not in text
    project.upgrade()
    project.check()
    run_one_job(database, model, "Tenant 2")
    project.downgrade()
    project.upgrade()
    project.options["tenant"] = "one"
    project.upgrade()
    for tenant in TENANTS:
        project.options["tenant"] = tenant
        project.check()
        project.downgrade("base")
    assert dump(database).replace("\n", "") == empty.replace("\n", "")


@both
def test_tables_created_with_schema_translate_map(database: Database, project: Project, strategy: str) -> None:
    model = job(strategy)
    project.metadata = model.metadata
    for tenant in TENANTS:
        create_tables(database, model.metadata, tenant)
        for by in ("path", "path before public", "name of the default"):
            project.options = {"tenant": tenant, "by": by}
            project.check()
        run_one_job(database, model, tenant)


@both
def test_migrations_with_schema_translate_map(database: Database, project: Project, strategy: str) -> None:
    """They are written with the search path: autogenerate does not translate schemas."""
    model = job(strategy)
    project.metadata = model.metadata
    empty = dump(database)
    project.options = {"tenant": TENANTS[0], "by": "path"}
    project.revise()
    for tenant in TENANTS:
        project.options = {"tenant": tenant, "by": "map"}
        project.upgrade()
        run_one_job(database, model, tenant)
        project.downgrade()
        project.upgrade()
        project.options["by"] = "path"
        project.check()
        project.options["by"] = "map"
        project.downgrade("base")
    assert dump(database) == empty


def test_a_function_missing_in_one_tenant_is_not_taken_from_another_schema(
    database: Database, project: Project
) -> None:
    """A trigger must not call the function of another schema, which would write that schema's messages."""
    model = job("delete_returning")
    project.metadata = model.metadata
    create_tables(database, model.metadata, "public")
    create_tables(database, model.metadata, "one")
    with database.connect() as connection:
        connection.execute("DROP FUNCTION one.sqlaqueue_message_job_sync CASCADE")
    project.options = {"tenant": "one", "by": "path before public"}
    assert "sqlaqueue_message_job_sync" in project.revise()
    project.upgrade()
    project.check()
    run_one_job(database, model, "one")
