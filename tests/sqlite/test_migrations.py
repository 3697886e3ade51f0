"""Alembic creates and changes the tables of queues in a file, in batch mode."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

import sqlaqueue.alembic
import sqlaqueue.sqlite
from sqlaqueue.exc import ConfigurationError
from tests.sqlite.features import Base

pytestmark = pytest.mark.once

ENV = """
import contextlib

import sqlalchemy as sa
from alembic import context

import sqlaqueue.sqlite
from tests.sqlite.features import Base

engine = sa.create_engine(context.config.get_main_option("sqlalchemy.url"))
if context.config.attributes["prepared"]:
    sqlaqueue.sqlite.prepare(engine)
with contextlib.ExitStack() as stack:
    stack.callback(engine.dispose)
    connection = stack.enter_context(engine.connect())
    metadata = [sa.MetaData(), Base.metadata] if context.config.attributes["several"] else Base.metadata
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
"""


@pytest.fixture
def project(tmp_path: Path) -> Config:
    config = Config(tmp_path / "alembic.ini", stdout=io.StringIO())
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("sqlalchemy.url", f"sqlite:///{tmp_path}/jobs.db")
    config.attributes |= {"prepared": True, "several": False}
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    return config


def revise(project: Config, name: str) -> str:
    with warnings.catch_warnings():
        # SQLite does not tell what an index of expressions is made of.
        warnings.filterwarnings("ignore", "autogenerate skipping|Skipped unsupported reflection")
        script: Any = command.revision(project, name, autogenerate=True)
    return Path(script.path).read_text()


def schema(path: Path) -> set[str]:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        texts = connection.scalars(sa.text("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
    engine.dispose()
    return {text for text in texts if "INDEX" in text or "TRIGGER" in text}


@pytest.mark.parametrize("several", [False, True], ids=["one_metadata", "several"])
def test_migrations_create_what_create_all_creates(project: Config, tmp_path: Path, *, several: bool) -> None:
    project.attributes["several"] = several
    revise(project, "create")
    command.upgrade(project, "head")
    made = sa.create_engine(f"sqlite:///{tmp_path}/made.db")
    sqlaqueue.sqlite.prepare(made)
    Base.metadata.create_all(made)
    made.dispose()
    assert schema(tmp_path / "jobs.db") == schema(tmp_path / "made.db")
    again = revise(project, "nothing")
    assert again.count("    pass\n") == 2
    command.upgrade(project, "head")
    command.downgrade(project, "base")
    assert schema(tmp_path / "jobs.db") == set()


@pytest.mark.parametrize("several", [False, True], ids=["one_metadata", "several"])
def test_an_engine_that_is_not_prepared_is_refused(project: Config, *, several: bool) -> None:
    project.attributes |= {"prepared": False, "several": several}
    with pytest.raises(ConfigurationError, match=r"env.py: .* call sqlaqueue.sqlite.prepare\(engine\)"):
        revise(project, "create")
