"""A project with migrations in a temporary directory, whose Alembic commands run in this process."""

from __future__ import annotations

import io
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.servers import Database

ENV = """\
from alembic import context
from sqlalchemy import NullPool, create_engine
{plugin}

config = context.config
options = config.attributes["options"]

if context.is_offline_mode():
    context.configure(url=config.attributes["url"], target_metadata=config.attributes["metadata"], **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    options_of_engine = {{"execution_options": config.attributes["execution_options"], "poolclass": NullPool}}
    engine = create_engine(config.attributes["url"], **options_of_engine)
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

    def __post_init__(self) -> None:
        versions = self.directory / "versions"
        if not versions.exists():
            versions.mkdir(parents=True)
            (self.directory / "env.py").write_text(ENV.format(plugin=self.plugin))
            (self.directory / "script.py.mako").write_text(SCRIPT)

    def config(self, **x: str) -> Config:
        config = Config(output_buffer=io.StringIO(), stdout=io.StringIO())
        config.set_main_option("script_location", str(self.directory))
        config.attributes.update(
            metadata=self.metadata,
            url=self.database.url(self.driver).replace("postgres@", f"{self.user}@"),
            options=self.options,
            execution_options=self.execution_options,
        )
        if x:
            config.cmd_opts = type("Options", (), {"x": [f"{name}={value}" for name, value in x.items()]})()
        return config

    def revise(self, message: str = "change", **x: str) -> str:
        """Run ``alembic revision --autogenerate`` and return the text of the migration."""
        script: Any = command.revision(self.config(**x), message, autogenerate=True)
        return Path(script.path).read_text()

    def edit(self, old: str, new: str) -> None:
        """Change the newest migration, as its reader would."""
        script = ScriptDirectory.from_config(self.config())
        path = Path(script.get_revision("head").path)
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    def upgrade(self, to: str = "head") -> None:
        command.upgrade(self.config(), to)

    def downgrade(self, to: str = "-1") -> None:
        command.downgrade(self.config(), to)

    def check(self) -> None:
        """Run ``alembic check``, which raises when something is left to be done."""
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
    # Newer ones write a random key there.
    return "\n".join(line for line in text.splitlines() if not line.startswith(("\\restrict", "\\unrestrict")))
