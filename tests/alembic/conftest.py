"""A project with migrations in a temporary directory, whose commands run in this process or as a user runs them."""

from __future__ import annotations

import io
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, complete
from tests.mapping.conftest import (
    supply,  # noqa: F401 - fixtures are found by being here
    tidy,  # noqa: F401 - fixtures are found by being here
)
from tests.models import STRATEGIES
from tests.programs import ROOT, run_program
from tests.servers import Database

# delete_returning has everything that batch_select has in a database.
every_strategy = pytest.mark.parametrize(
    "strategy",
    [pytest.param(each, marks=pytest.mark.thorough) if each == "batch_select" else each for each in STRATEGIES],
)


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no bytecode: a migration edited within the second it was written would run as first compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


ENGINES: dict[str, sa.Engine] = {}
"""The engines of projects by their URLs. The first queries of a connection take long: a test has one."""


def disconnect() -> None:
    while ENGINES:
        ENGINES.popitem()[1].dispose()


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    yield
    disconnect()


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url())
    yield engine
    engine.dispose()


@pytest.fixture
def make(database: Database, tmp_path: Path) -> Callable[[type[Any]], Project]:
    """Return a function that makes a project whose database matches a model."""

    def make(model: type[Any], **options: Any) -> Project:
        project = Project(directory=tmp_path, database=database, metadata=model.metadata, options=options)
        project.revise("create")
        project.upgrade()
        return project

    return make


# -- projects, whose Alembic commands run in this process --------------------------------------------------------------

ENV = """\
from alembic import context
{plugin}

config = context.config
options = config.attributes["options"]

if context.is_offline_mode():
    context.configure(url=config.attributes["url"], target_metadata=config.attributes["metadata"], **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = config.attributes["engine"]
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=config.attributes["metadata"], **options)
        with context.begin_transaction():
            context.run_migrations()
"""
SCRIPT = '''\
"""${message}"""

from alembic import op
import sqlalchemy as sa
import sqlmodel
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''


@dataclass(kw_only=True)
class Project:
    """A directory with migrations for one database."""

    directory: Path
    database: Database
    metadata: sa.MetaData | Sequence[sa.MetaData]
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``context.configure()``."""
    execution_options: dict[str, Any] = field(default_factory=dict)
    plugin: str = "import sqlaqueue.alembic"
    driver: Any = "psycopg"
    user: str = "postgres"
    differences: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        versions = self.directory / "versions"
        if not versions.exists():
            versions.mkdir(parents=True)
            (self.directory / "env.py").write_text(ENV.format(plugin=self.plugin))
            (self.directory / "script.py.mako").write_text(SCRIPT)

    @property
    def url(self) -> str:
        return self.database.url(self.driver).replace("postgres@", f"{self.user}@")

    @property
    def engine(self) -> sa.Engine:
        if self.url not in ENGINES:
            ENGINES[self.url] = sa.create_engine(self.url)
        return ENGINES[self.url]

    def config(self, **x: str) -> Config:
        config = Config(output_buffer=io.StringIO(), stdout=io.StringIO())
        config.set_main_option("script_location", str(self.directory))
        config.attributes.update(
            metadata=self.metadata,
            url=self.url,
            options=self.options,
            engine=self.engine.execution_options(**self.execution_options),
        )
        if x:
            config.cmd_opts = type("Options", (), {"x": [f"{name}={value}" for name, value in x.items()]})()
        return config

    def revise(self, message: str = "change", model: Any = None, **x: str) -> str:
        """Run ``alembic revision --autogenerate``, for another model if one is given; return the migration.

        ``differences`` has what ``alembic check`` would have reported.
        """
        if model is not None:
            self.metadata = model.metadata

        def remember(_: Any, __: Any, directives: Any) -> None:
            self.differences = directives[0].upgrade_ops.as_diffs()

        options: Any = {"autogenerate": True, "process_revision_directives": remember}
        script: Any = command.revision(self.config(**x), message, **options)
        return Path(script.path).read_text()

    def edit(self, old: str, new: str) -> None:
        """Replace a text in the newest migration."""
        script = ScriptDirectory.from_config(self.config())
        path = Path(script.get_revision("head").path)
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    def migrate(self, model: Any = None) -> str:
        """Write a migration, to another model if there is one, run it, and check that nothing else differs."""
        text = self.revise(model=model)
        self.upgrade()
        self.check()
        return text

    def upgrade(self, to: str = "head") -> None:
        command.upgrade(self.config(), to)

    def downgrade(self, to: str = "-1") -> None:
        command.downgrade(self.config(), to)

    def check(self) -> None:
        """Run ``alembic check``, which raises if the database differs from the models."""
        command.check(self.config())

    def current(self) -> str:
        """Return the revision of the database."""
        with self.database.connect() as connection:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        assert row is not None
        return str(row[0])

    def script(self, revisions: str = "head", *, down: bool = False) -> str:
        """Return what ``--sql`` writes."""
        config = self.config()
        (command.downgrade if down else command.upgrade)(config, revisions, sql=True)
        assert isinstance(config.output_buffer, io.StringIO)
        return config.output_buffer.getvalue()


def dump(database: Database) -> str:
    """Return the schema of a database as ``pg_dump`` writes it, without Alembic's own table."""
    command_line = [
        database.server.bin_directory / "pg_dump",
        "--schema-only",
        "--no-owner",
        "--exclude-table=*.alembic_version",
        "--dbname",
        database.dsn,
    ]
    text = subprocess.check_output(command_line, text=True)
    # Newer versions of pg_dump write a random key into these lines.
    return "\n".join(line for line in text.splitlines() if not line.startswith(("\\restrict", "\\unrestrict")))


def administer(database: Database, *statements: str) -> None:
    """Execute statements, each in a transaction of its own."""
    with database.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())


def set_for_all(database: Database, *settings: str) -> None:
    """Change settings of the sessions that begin from now on: ``SET name = value`` or ``RESET ALL``."""
    administer(database, *(f"ALTER DATABASE {database.name} {setting}" for setting in settings))
    disconnect()


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def changed(project: Project, model: type[Any] | None = None) -> str:
    """Check that autogenerate finds a change, and that the migration makes it and its downgrade undoes it."""
    if model is not None:
        project.metadata = model.metadata
    before = dump(project.database)
    text = project.revise("change")
    assert project.differences
    project.upgrade()
    project.check()
    project.downgrade()
    assert in_any_order(dump(project.database)) == in_any_order(before)
    project.upgrade()
    return text


def in_any_order(schema: str) -> list[str]:
    """Return a schema without the order of its parts: a downgrade adds columns last."""
    return sorted(re.split(r"[\s,()]+", schema))


def wanted(model: type[Any], database: Database) -> str:
    """Return the schema that create_all() makes from a model."""
    with database.server.database() as other:
        engine = sa.create_engine(other.url())
        model.metadata.create_all(engine)
        engine.dispose()
        return dump(other)


# -- Alembic's command line as a user runs it: in processes, in the directory of a project -----------------------------

RUN_ALL = """
import runpy, shlex, sys, warnings
from alembic.config import main

sys.dont_write_bytecode = True
warnings.simplefilter("error")
for command in sys.argv[1:]:
    if command.endswith(".py"):
        runpy.run_path(command, run_name="__main__")
    else:
        main(argv=shlex.split(command)[1:], prog="alembic")
"""
PROGRAMS = ("alembic", "sqlaqueue")


@dataclass
class Shell:
    """A directory, and programs that import this source tree even if it is not installed."""

    directory: Path
    database: Database

    def __post_init__(self) -> None:
        self.programs = self.directory.parent / f"{self.directory.name} programs"
        self.programs.mkdir()
        self.directory.mkdir(exist_ok=True)
        for name in PROGRAMS:
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m {name} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.run_all_program = self.programs / "run_all.py"
        self.run_all_program.write_text(RUN_ALL)

    def run(self, command: str) -> str:
        """Run a command, then point ``alembic.ini`` at the test's database."""
        environment = {
            **os.environ,
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "error",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self._use_database()
        return done.stdout

    def run_all(self, *commands: str) -> str:
        """Run Alembic commands and Python files in one forked process: to start Python takes longer than they do."""
        environment = {**os.environ, "PYTHONPATH": str(self.directory)}
        done = run_program(self.run_all_program, *commands, environment=environment, directory=self.directory)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        self._use_database()
        return done.stdout

    def init(self, template: str) -> None:
        """Begin a project with a template of the library."""
        found = run_program("sqlaqueue", "alembic-template", template)
        self.run_all(f"alembic init -t {found.stdout.strip()} migrations")

    def _use_database(self) -> None:
        ini = self.directory / "alembic.ini"
        if ini.exists():
            self.write(ini.name, ini.read_text())

    def write(self, name: str, text: str) -> None:
        """Write a file, with the test's database where the text has that of a reader."""
        for driver in ("psycopg", "asyncpg"):
            text = text.replace(f"postgresql+{driver}://localhost/app", self.database.url(driver))
        (self.directory / name).write_text(text)

    def newest_migration(self) -> Path:
        """Return the file of the head revision."""
        versions = {}
        for path in (self.directory / "migrations" / "versions").glob("*.py"):
            revision, down = re.findall(r"^(?:down_)?revision: .*? = (.*)$", path.read_text(), re.MULTILINE)
            versions[revision] = (down, path)
        parents = {down for down, _ in versions.values()}
        (head,) = (path for revision, (_, path) in versions.items() if revision not in parents)
        return head

    def patch(self, diff: str) -> None:
        """Apply a diff to ``app.py``, or to the newest migration if it does not fit there."""
        old = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("-"))
        new = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("+"))
        app = self.directory / "app.py"
        for path in (app, self.newest_migration()):
            if not old:
                path.write_text(f"{path.read_text()}\n\n{new}")
                return
            if old in path.read_text():
                path.write_text(path.read_text().replace(old, new, 1))
                return
        message = f"{old!r} is neither in app.py nor in the newest migration"
        raise AssertionError(message)


# -- a class that tests map with different configurations, and what they do with its jobs ------------------------------


def new_base(**attributes: Any) -> type[Any]:
    return type("Base", (DeclarativeBase,), attributes)


def order(config: QueueConfig | None, base: type[Any] | None = None, **attributes: Any) -> type[Any]:
    """Map a class to the table ``orders``, as a queue with ``config``, or as no queue if it is None.

    :param base: a declarative base; by default the class has one of its own.
    """
    base = base or new_base()
    name = f"Order{len(base.registry.mappers) or ''}"
    body = {
        "__tablename__": "orders",
        "id": mapped_column(sa.Integer, primary_key=True),
        "article": mapped_column(sa.Text, nullable=False),
        **attributes,
    }
    if config is None:
        return type(name, (base,), body)
    return type(name, (QueueMixin, base), {**body, "__queue__": config})


def enqueue(engine: sa.Engine, model: type[Any], *articles: str, **values: Any) -> None:
    with Session(engine) as session:
        session.add_all(model(article=article, **values) for article in articles)
        session.commit()


def run_all(engine: sa.Engine, model: type[Any]) -> list[str]:
    """Claim and complete all due jobs, and return their articles."""
    with Session(engine) as session:
        jobs = session.scalars(claim(model, 100)).all()
        done = sorted(job.article for job in jobs)
        if jobs:
            session.execute(complete(jobs))
        session.commit()
        return done


def statuses(engine: sa.Engine) -> dict[str, str]:
    """Return the status of each row by its article."""
    with engine.connect() as connection:
        return {row.article: row.status for row in connection.execute(sa.text("SELECT article, status FROM orders"))}
