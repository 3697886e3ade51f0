"""The statements for other languages on the page about enqueueing, executed by those that this machine has."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Unique
from tests.docs.pages import DOCS
from tests.programs import wait_until
from tests.servers import Database

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]
    subject: Mapped[str] = mapped_column(default="")


class Reminder(QueueMixin, Base):
    __tablename__ = "reminder"
    __queue__ = QueueConfig(unique=Unique("customer_id", "kind"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int]
    kind: Mapped[str]
    text: Mapped[str] = mapped_column(default="")


class Extract(QueueMixin, Base):
    __tablename__ = "extract"

    id: Mapped[int] = mapped_column(primary_key=True)


class Load(QueueMixin, Base):
    __tablename__ = "load"
    __queue__ = QueueConfig(waits_for="extract")

    id: Mapped[int] = mapped_column(primary_key=True)
    extract_id: Mapped[int] = mapped_column(ForeignKey("extract.id"), index=True)
    extract: Mapped[Extract] = relationship()


GO = """
package main

import (
	"database/sql"
	"log"
	"os"

	_ "github.com/lib/pq"
)

func main() {
	db, err := sql.Open("postgres", os.Getenv("URL"))
	if err != nil {
		log.Fatal(err)
	}
	{
		STATEMENT
		if err != nil {
			log.Fatal(err)
		}
	}
}
"""
NODE = """
const { Client } = require("pg");

(async () => {
  const client = new Client({ connectionString: process.env.URL });
  await client.connect();
  // One transaction, so that no worker has run the first job before the second is inserted.
  await client.query("BEGIN");
  for (const expected of [1, 0]) {
    STATEMENT
    if (rowCount !== expected) throw new Error(`${rowCount} rows`);
  }
  await client.query("COMMIT");
  await client.end();
})();
"""
RUBY = """
require "pg"

connection = PG.connect(ENV["URL"])
STATEMENT
"""


def program(language: str, path: Path) -> list[str]:
    """Write the page's statement into a program; return the command that runs it, or skip if the client is missing."""
    (statement,) = re.findall(
        rf"^```{language}\n(.*?)^```$", (DOCS / "enqueue.md").read_text(), re.MULTILINE | re.DOTALL
    )
    template, name, command, probe = {
        "go": (GO, "main.go", ["go", "run", "main.go"], ["go", "list", "github.com/lib/pq"]),
        "js": (NODE, "main.js", ["node", "main.js"], ["node", "-e", "require('pg')"]),
        "ruby": (RUBY, "main.rb", ["ruby", "main.rb"], ["ruby", "-e", "require 'pg'"]),
    }[language]
    if (
        not shutil.which(probe[0])
        or subprocess.run(probe, capture_output=True, check=False, env=variables()).returncode
    ):
        pytest.skip(f"there is no {probe[0]} with a client for PostgreSQL")
    (path / name).write_text(template.replace("STATEMENT", statement))
    return command


def variables(**given: str) -> dict[str, str]:
    # Where Debian puts the packages of Go; NODE_PATH is that of the environment.
    return {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": "-mod=mod", **os.environ, **given}


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.url())
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.mark.parametrize(("language", "models"), [("go", [Email]), ("js", [Reminder]), ("ruby", [Extract, Load])])
def test_a_plain_insert_wakes_a_worker(
    language: str, models: list[type[QueueMixin]], engine: Engine, database: Database, tmp_path: Path
) -> None:
    command = program(language, tmp_path)
    sessions = sessionmaker(engine)
    # A minute without a poll: only a notification wakes them in time.
    consumers = [Consumer(model, lambda _session, _job: None, sessions, poll_interval=60) for model in models]
    with consumers[0], consumers[-1] if len(consumers) > 1 else Session(engine):
        url = database.url().replace("+psycopg", "")
        subprocess.run(command, cwd=tmp_path, env=variables(URL=url), check=True, timeout=120)

        def states() -> list[str]:
            with Session(engine) as session:
                return [state for model in models for state in session.scalars(select(model.status))]

        wait_until(lambda: states() == ["completed"] * len(models), lambda: str(states()), seconds=20)
