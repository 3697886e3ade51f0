"""Autogenerate refuses the tables of queues, which a migration creates by create_all()."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.orm import Session

import sqlaqueue.alembic
import sqlaqueue.mariadb
from sqlaqueue import claim
from sqlaqueue.exc import ConfigurationError
from tests.mariadb.models import Base, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once

ENV = """
import contextlib

import sqlalchemy as sa
from alembic import context

import sqlaqueue.mariadb
from tests.mariadb.models import Base, ByUuid, Job, Pair, Report

QUEUES = {model.__tablename__ for model in (ByUuid, Job, Pair, Report)}


def include_object(object_, name, type_, reflected, compare_to):
    return type_ != "table" or (name not in QUEUES and not name.startswith("sqlaqueue_"))


excluding = context.config.attributes["excluding"]
engine = sa.create_engine(context.config.attributes["url"])
sqlaqueue.mariadb.prepare(engine)
with contextlib.ExitStack() as stack:
    stack.callback(engine.dispose)
    connection = stack.enter_context(engine.connect())
    options = {"include_object": include_object} if excluding else {}
    metadata = [sa.MetaData(), Base.metadata] if context.config.attributes["several"] else Base.metadata
    context.configure(connection=connection, target_metadata=metadata, **options)
    with context.begin_transaction():
        context.run_migrations()
"""
CREATE = """
    from tests.mariadb.models import Base, ByUuid, Job, Pair, Report
    tables = [model.__table__ for model in (ByUuid, Job, Pair, Report)]
    Base.metadata.create_all(op.get_bind(), tables=tables)
"""


@pytest.fixture
def database(mariadb: MariaDBServer) -> Iterator[str]:
    with mariadb.database() as name:
        yield name


@pytest.fixture(params=["mariadb+pymysql", "mysql+pymysql"])
def project(mariadb: MariaDBServer, database: str, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    config = Config(tmp_path / "alembic.ini", stdout=io.StringIO())
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.attributes |= {"url": mariadb.url(database, request.param), "excluding": True, "several": False}
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    return config


def revise(project: Config, name: str, *, autogenerate: bool = True) -> Path:
    script: Any = command.revision(project, name, autogenerate=autogenerate)
    return Path(script.path)


@pytest.mark.parametrize("several", [False, True], ids=["one_metadata", "several"])
def test_queues_are_refused(project: Config, *, several: bool) -> None:
    project.attributes |= {"excluding": False, "several": several}
    said = r"the tables of queues on MariaDB \(by_uuid, job, .*sqlaqueue_attempt.*\); exclude them by include_object"
    with pytest.raises(ConfigurationError, match=said):
        revise(project, "create")


def test_what_is_done_instead(project: Config, mariadb: MariaDBServer, database: str) -> None:
    path = revise(project, "queues", autogenerate=False)
    path.write_text(path.read_text().replace("    pass\n", CREATE, 1))
    command.upgrade(project, "head")
    rest = revise(project, "rest").read_text()
    assert [name for name in Base.metadata.tables if f"create_table('{name}'" in rest] == ["child", "effect"]
    command.upgrade(project, "head")
    assert revise(project, "nothing").read_text().count("    pass\n") == 2
    engine = sa.create_engine(mariadb.url(database))
    sqlaqueue.mariadb.prepare(engine)
    with Session(engine) as session:
        session.add(Job(id=1))
        session.commit()
        assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
    engine.dispose()
