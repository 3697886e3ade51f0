"""Together with other plug-ins: alembic_utils, which drops unregistered objects, and alembic-postgresql-enum."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.migrations.commands import ROOT, Shell
from tests.migrations.project import dump

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Database

pytestmark = pytest.mark.once

ENV = """
from alembic import context
from sqlalchemy import NullPool, create_engine
import sqlaqueue.alembic
import app
{other}

with create_engine(app.URL, poolclass=NullPool).connect() as connection:
    context.configure(connection=connection, target_metadata=app.Base.metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
"""
UTILS = """
from alembic_utils.pg_function import PGFunction
from alembic_utils.replaceable_entity import register_entities

register_entities([PGFunction("public", "note()", "RETURNS text LANGUAGE sql AS $$ SELECT 'noted' $$")])
"""
APP = """
import enum, os
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, mapped_column
from sqlaqueue import QueueConfig, QueueMixin

URL = "postgresql+psycopg://localhost/app"
QUEUE = os.environ.get("STEP") != "0"
State = enum.Enum("State", "pending processing completed failed cancelled")

class Base(DeclarativeBase):
    pass

class Job(*((QueueMixin, Base) if QUEUE else (Base,))):
    __tablename__ = "job"
    __queue__ = QueueConfig(strategy="delete_returning", columns={"status": "status"})
    id = mapped_column(sa.Integer, primary_key=True)
    note = mapped_column(sa.Text)
    if QUEUE:
        status = mapped_column(sa.Enum(State, name="state"), server_default="pending", nullable=False)
"""


def project(database: Database, directory: Path, other: str) -> Shell:
    if importlib.util.find_spec("alembic_utils") is None or importlib.util.find_spec("alembic_postgresql_enum") is None:
        pytest.skip("alembic_utils and alembic-postgresql-enum come with the extra test, which is not installed")
    shell = Shell(directory / "project", database)
    shell.write("app.py", APP)
    shell.write("alembic.ini", "[alembic]\nscript_location = migrations\n")
    (shell.directory / "migrations" / "versions").mkdir(parents=True)
    template = ROOT / "alembic_templates" / "sync" / "script.py.mako"
    shell.write("migrations/script.py.mako", template.read_text())
    shell.write("migrations/env.py", ENV.format(other=other))
    return shell


ADOPT = """
import os, sys
os.environ["STEP"] = "1"
sys.modules.pop("app", None)
"""
ANSWER = """
import pathlib
for path in pathlib.Path("migrations/versions").glob("*.py"):
    path.write_text(path.read_text().replace("existing_rows=...", "existing_rows='completed'"))
"""
LEAVE = ADOPT.replace('"1"', '"0"')


@pytest.mark.parametrize("other", [UTILS, "import alembic_postgresql_enum"], ids=["alembic_utils", "enum"])
def test_a_queue_is_added_and_removed(database: Database, tmp_path: Path, other: str) -> None:
    empty = dump(database)
    shell = project(database, tmp_path, other)
    for name, text in (("adopt.py", ADOPT), ("answer.py", ANSWER), ("leave.py", LEAVE)):
        shell.write(name, text)
    # In one process: starting Python takes longer than the migrations.
    shell.run_all(
        "leave.py",
        "alembic revision --autogenerate -m table",
        "alembic upgrade head",
        "alembic check",
        "adopt.py",
        "alembic revision --autogenerate -m queue",
        "answer.py",
        "alembic upgrade head",
        "alembic check",
        "alembic downgrade -1",
        "alembic upgrade head",
        "leave.py",
        "alembic revision --autogenerate -m plain",
        "answer.py",
        "alembic upgrade head",
        "alembic check",
        "alembic downgrade -1",
        "alembic downgrade base",
    )
    assert dump(database) == empty
