"""The templates and the commands on the page about migrations work as printed, beside other plug-ins as well."""

import contextlib
import importlib.util
import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

import pytest
import sqlalchemy as sa

from tests.alembic.conftest import ROOT, Shell, administer, dump
from tests.servers import Database

TEMPLATES = sorted(each.name for each in (ROOT / "alembic_templates").iterdir())
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def readme_example() -> str:
    """Return the model of the README's first example, with an engine for PostgreSQL and without create_all()."""
    blocks = [text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python"]
    example = next(text for text in blocks if "class Email(QueueMixin" in text)
    return f"{example.partition('def send')[0]}engine = prepare(create_engine('postgresql+psycopg://localhost/app'))\n"


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_readmes_example_in_a_new_project(database: Database, tmp_path: Path, template: str) -> None:
    shell = Shell(tmp_path / "project", database)
    shell.write("app.py", readme_example())
    before = dump(database)
    shell.init(template)
    shell.write("use.py", USE)
    printed = shell.run_all(
        "alembic revision --autogenerate -m 'first tables'",
        "alembic upgrade head --sql",
        "alembic upgrade head",
        "alembic check",
        "use.py",
        "alembic downgrade base",
    )
    assert "CREATE TABLE email" in printed
    assert "\nto ada@example.com\n" in printed
    assert dump(database) == before


class File(NamedTuple):
    """A file of SQLite, in the place of a database."""

    path: Path

    def url(self, driver: str) -> str:
        return f"sqlite{'+aiosqlite' if driver == 'asyncpg' else ''}:///{self.path}"


@pytest.mark.once
@pytest.mark.parametrize(
    "template", ["sync", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("async", "pyproject"))]
)
def test_the_readmes_example_in_a_new_project_on_sqlite(tmp_path: Path, template: str) -> None:
    shell = Shell(tmp_path / "project", File(tmp_path / "app.db"))
    shell.write("app.py", readme_example())
    shell.init(template)
    shell.write("use.py", USE)
    revise = "alembic revision --autogenerate -m change"
    printed = shell.run_all(revise, "alembic upgrade head", "alembic check", "use.py")
    assert "\nto ada@example.com\n" in printed
    # Only a copy of the table can lose a column with a check.
    shell.write("app.py", readme_example().replace("max_attempts=5", "columns={'priority': None}"))
    shell.run_all(revise, "alembic upgrade head", "alembic check", "alembic downgrade base")
    with contextlib.closing(sqlite3.connect(tmp_path / "app.db")) as file:
        assert file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("alembic_version",)]


USE = """
from app import Consumer, Email, Session, engine, sessionmaker

with Session(engine) as session:
    session.add(Email(to="ada@example.com"))
    session.commit()
Consumer(Email, lambda session, email: print("to", email.to), sessionmaker(engine)).drain()
session.close()
engine.dispose()
"""


def test_the_template_for_several_schemas_creates_schemas(database: Database, tmp_path: Path) -> None:
    shell = Shell(tmp_path / "project", database)
    shell.write("app.py", readme_example().replace('__tablename__ = "email"', f"{TABLE}"))
    shell.init("schemas")
    administer(database, "CREATE SCHEMA theirs; CREATE TABLE theirs.something (id int)")
    shell.run_all(
        "alembic revision --autogenerate -m 'first tables'",
        "alembic upgrade head",
        "alembic check",
    )
    assert "theirs" not in shell.newest_migration().read_text()
    assert 'CREATE TABLE "Post".email' in dump(database)


TABLE = """__tablename__ = "email"
    __table_args__ = {"schema": "Post"}"""


@pytest.mark.few(1)
def test_the_page_on_migrations(database: Database, tmp_path: Path) -> None:
    """Its blocks are run in order: files, commands, and diffs of files."""
    shell = Shell(tmp_path / "project", database)
    page = (ROOT / "docs" / "migrations.md").read_text()
    commands = 0
    for kind, text in BLOCK.findall(page):
        if kind == "python" and text.startswith("# app.py"):
            shell.write("app.py", text)
        elif kind == "diff":
            shell.patch(text)
        elif kind == "sql":
            with database.connect() as connection:
                connection.execute(text)
        elif kind == "sh":
            lines = [line for line in text.splitlines() if not line.startswith("pip ")]
            for line in lines:
                if "$(" in line:
                    shell.run(line)
            if alone := [line for line in lines if "$(" not in line]:
                shell.run_all(*alone)
            commands += len(lines)
    assert commands
    engine = sa.create_engine(database.url())
    inspector = sa.inspect(engine)
    assert {"sqlaqueue_message_email", "sqlaqueue_message_invoice"} <= {*inspector.get_table_names()}
    assert "status" in {column["name"] for column in inspector.get_columns("orders")}
    engine.dispose()


@pytest.mark.once
def test_all_templates_share_one_script_template() -> None:
    scripts = {(ROOT / "alembic_templates" / name / "script.py.mako").read_text() for name in TEMPLATES}
    assert len(scripts) == 1


@pytest.mark.once
def test_every_operation_that_the_pages_name_exists() -> None:
    from alembic.operations import Operations  # noqa: PLC0415 - the plug-in adds to it

    import sqlaqueue.alembic  # noqa: F401, PLC0415 - the plug-in adds to it

    pages = [ROOT / "docs" / "migrations.md", ROOT / "docs" / "evidence" / "autogenerate.md"]
    named = {name for page in pages for name in re.findall(r"`op\.(\w+)\(", page.read_text())}
    assert named
    assert {name for name in named if not hasattr(Operations, name)} == set()


# -- together with other plug-ins: alembic_utils, which drops unregistered objects, and alembic-postgresql-enum --------

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


@pytest.mark.once
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
