"""Alembic writes and runs migrations of queues on SQLite and MariaDB, and finds no difference afterwards."""

from __future__ import annotations

import io
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.ddl.base import AddColumn
from alembic.util import CommandError
from sqlalchemy.orm import Session, mapped_column
from sqlalchemy.schema import CreateColumn

import sqlaqueue
import sqlaqueue.alembic
from sqlaqueue import QueueConfig, QueueMixin, Schedule, Unique, claim, complete, enqueue
from sqlaqueue.testing import fire_schedules
from tests.alembic.conftest import SCRIPT
from tests.models import new_base
from tests.waits.models import make_batch, make_dependent

pytestmark = [
    pytest.mark.once,
    # SQLAlchemy does not reflect such indexes of SQLite; the plug-in reads their texts itself.
    pytest.mark.filterwarnings("ignore:autogenerate skipping|Skipped unsupported reflection"),
]

ENV = """
from alembic import context

attributes = context.config.attributes
with attributes["engine"].connect() as connection:
    context.configure(connection=connection, target_metadata=attributes["metadata"], **attributes["options"])
    with context.begin_transaction():
        context.run_migrations()
    connection.commit()
"""


class Project:
    """A directory with migrations for one database."""

    def __init__(self, directory: Path, engine: sa.Engine, **options: Any) -> None:
        self.directory, self.engine = directory, engine
        self.metadata: Any = sa.MetaData()
        self.options = {"render_as_batch": engine.dialect.name == "sqlite", **options}
        (directory / "versions").mkdir(parents=True)
        (directory / "env.py").write_text(ENV)
        (directory / "script.py.mako").write_text(SCRIPT.replace("import sqlmodel\n", ""))

    def config(self) -> Config:
        config = Config(output_buffer=io.StringIO(), stdout=io.StringIO())
        config.set_main_option("script_location", str(self.directory))
        config.attributes.update(metadata=self.metadata, engine=self.engine, options=self.options)
        return config

    def revise(self, model: Any = None) -> str:
        """Run ``alembic revision --autogenerate``; return the migration."""
        if model is not None:
            self.metadata = getattr(model, "metadata", model)
        script: Any = command.revision(self.config(), "change", autogenerate=True)
        self.newest = Path(script.path)
        return self.newest.read_text()

    def answer(self, old: str, new: str) -> None:
        text = self.newest.read_text()
        assert old in text, text
        self.newest.write_text(text.replace(old, new))

    def upgrade(self) -> None:
        command.upgrade(self.config(), "head")

    def downgrade(self, to: str = "-1") -> None:
        command.downgrade(self.config(), to)

    def check(self) -> None:
        """Run ``alembic check``, which raises if it finds a difference."""
        command.check(self.config())

    def migrate(self, model: Any) -> str:
        text = self.revise(model)
        self.upgrade()
        self.check()
        return text


@pytest.fixture
def project(engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    # A migration that is edited within the second in which it was written would run as first compiled.
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    return Project(tmp_path / "migrations", engine)


def dump(engine: sa.Engine) -> dict[str, list[str]]:
    """Return the definition of each table, its indexes and triggers, in parts that a downgrade may reorder."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            query = sa.text("SELECT tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL")
            found = [(row.tbl_name, row.sql) for row in connection.execute(query)]
        else:
            found = []
            for table in sa.inspect(connection).get_table_names():
                found.append((table, connection.exec_driver_sql(f"SHOW CREATE TABLE `{table}`").all()[0][1]))
                triggers = connection.exec_driver_sql(f"SHOW TRIGGERS LIKE '{table}'").all()
                found += [(table, str(trigger[:4])) for trigger in triggers]
    # The next number of a key is no part of the schema, and a default of NULL is the same as none.
    found = [(table, re.sub(r" AUTO_INCREMENT=\d+| DEFAULT NULL", "", text)) for table, text in found]
    parts: dict[str, list[str]] = {}
    for table, text in found:
        if table != "alembic_version":
            parts.setdefault(table, []).extend(part for part in re.split(r"[\s,()\"]+", text) if part)
    return {table: sorted(words) for table, words in parts.items()}


def wanted(engine: sa.Engine, model: Any, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, list[str]]:
    """Return what create_all() makes of a model."""
    if engine.dialect.name == "sqlite":
        url = f"sqlite:///{tmp_path / 'wanted.db'}"
        other = sqlaqueue.prepare(sa.create_engine(url))
        model.metadata.create_all(other)
        found = dump(other)
        other.dispose()
        return found
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        other = sqlaqueue.prepare(sa.create_engine(server.url(name)))
        model.metadata.create_all(other)
        found = dump(other)
        other.dispose()
    return found


def order(config: QueueConfig | None = None, **attributes: Any) -> Any:
    """Map a class to the table ``orders``, as a queue with ``config``, or as no queue without."""
    body = {
        "__tablename__": "orders",
        "id": mapped_column(sa.Integer, primary_key=True),
        "article": mapped_column(sa.String(50), nullable=False),
        **attributes,
    }
    base = new_base()
    if config is None:
        return type("Order", (base,), body)
    return type("Order", (QueueMixin, base), {**body, "__queue__": config})


PLAIN = QueueConfig()
CONFIGS = {
    "plain": PLAIN,
    "all_side_tables": QueueConfig(
        attempt_history=timedelta(days=3),
        retention={"completed": timedelta(days=1)},
        extra_columns=("started_at", "traceparent"),
    ),
    "unique": QueueConfig(unique=Unique("article")),
    "unique_within": QueueConfig(
        unique=Unique("article", within=timedelta(hours=1), states=("pending", "processing", "completed"))
    ),
}


def run_one(engine: sa.Engine, model: Any, article: str = "book") -> list[str]:
    """Enqueue and run a job; return the articles of all due jobs."""
    with Session(engine) as session:
        enqueue(session, model(article=article))
        session.commit()
        jobs = session.scalars(claim(model, 10)).all()
        session.execute(complete(jobs))
        articles = [job.article for job in jobs]
        session.commit()
    return articles


@pytest.mark.few(3)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_migration_creates_what_create_all_creates(
    project: Project, config: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = order(CONFIGS[config])
    project.migrate(model)
    assert dump(project.engine) == wanted(project.engine, model, request, tmp_path)
    assert run_one(project.engine, model) == ["book"]
    project.downgrade("base")
    assert dump(project.engine) == {}


CHANGES: dict[str, tuple[QueueConfig, QueueConfig]] = {
    "unique jobs": (CONFIGS["plain"], CONFIGS["unique"]),
    "no unique jobs": (CONFIGS["unique"], CONFIGS["plain"]),
    "other unique jobs": (CONFIGS["unique"], QueueConfig(unique=Unique("article", states=("pending",)))),
    "a period": (CONFIGS["unique"], CONFIGS["unique_within"]),
    "no period": (CONFIGS["unique_within"], CONFIGS["plain"]),
    "another period": (
        CONFIGS["unique_within"],
        QueueConfig(unique=Unique("article", within=60, states=("pending", "processing", "completed"))),
    ),
    # SQLite copies the table to drop a column, and SQLAlchemy does not see indexes of expressions.
    "no column beside a period": (
        QueueConfig(unique=Unique("article", within=60), extra_columns=("started_at",)),
        QueueConfig(unique=Unique("article", within=60)),
    ),
    "a retention": (CONFIGS["plain"], QueueConfig(retention={"completed": timedelta(days=1)})),
    "a column": (CONFIGS["plain"], QueueConfig(extra_columns=("started_at",))),
    "no column": (QueueConfig(extra_columns=("started_at",)), CONFIGS["plain"]),
    "an attempt history": (CONFIGS["plain"], QueueConfig(attempt_history=60)),
    "statistics": (CONFIGS["plain"], QueueConfig(statistics=True)),
    "no statistics": (QueueConfig(statistics=True), CONFIGS["plain"]),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_made_and_undone(
    project: Project, change: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    old, new = (order(config) for config in CHANGES[change])
    project.migrate(old)
    before = dump(project.engine)
    project.migrate(new)
    assert dump(project.engine) == wanted(project.engine, new, request, tmp_path)
    assert run_one(project.engine, new) == ["book"]
    project.downgrade()
    assert dump(project.engine) == before
    project.metadata = old.metadata
    # The revision of the change is no difference of the schema.
    project.newest.unlink()
    project.check()
    assert run_one(project.engine, old, "pen") == ["pen"]


def insert(engine: sa.Engine, *articles: str) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO orders (article) VALUES (:article)"), [{"article": each} for each in articles]
        )


def statuses(engine: sa.Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row.article: row.status for row in connection.execute(sa.text("SELECT article, status FROM orders"))}


ANSWERS = {
    "completed": ('"completed"', {"old": "completed", "sent": "completed"}),
    "each": (
        "sa.text(\"CASE WHEN article = 'sent' THEN 'completed' ELSE 'pending' END\")",
        {"old": "pending", "sent": "completed"},
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_table_with_rows_becomes_a_queue_and_a_table_again(project: Project, answer: str) -> None:
    text, expected = ANSWERS[answer]
    table, queue = order(), order(PLAIN)
    project.migrate(table)
    insert(project.engine, "old", "sent")
    project.revise(queue)
    with pytest.raises(CommandError, match=r"op\.add_queue_columns\('orders'\): the table may have rows"):
        project.upgrade()
    project.answer("existing_rows=...", f"existing_rows={text}")
    project.upgrade()
    project.check()
    assert statuses(project.engine) == expected
    insert(project.engine, "new")
    assert statuses(project.engine)["new"] == "pending"
    assert "new" in run_one(project.engine, queue)
    project.migrate(table)
    assert {column["name"] for column in sa.inspect(project.engine).get_columns("orders")} == {"id", "article"}
    assert list(dump(project.engine)) == ["orders"]
    with pytest.raises(CommandError, match=r"op\.add_queue_columns\('orders'\): the table may have rows"):
        project.downgrade()
    project.answer("existing_rows=...", "existing_rows='completed'")
    project.downgrade()
    assert {*statuses(project.engine).values()} == {"completed"}
    insert(project.engine, "again")
    assert run_one(project.engine, queue) == ["again", "book"]


def test_tables_with_schedules_are_kept(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    model, without = order(PLAIN), order(PLAIN)
    schedule = Schedule("daily", model, every=timedelta(days=1), values={"article": "book"})
    project.migrate(model)
    with Session(project.engine) as session:
        fire_schedules(session, [schedule])
        session.commit()
    project.migrate(without)
    assert "the tables sqlaqueue_schedule, sqlaqueue_tick are in no model, but are not dropped" in caplog.text
    assert {"sqlaqueue_schedule", "sqlaqueue_tick"} <= {*dump(project.engine)}
    # Neither if the last queue goes as well.
    project.migrate(order())
    assert {*dump(project.engine)} == {"orders", "sqlaqueue_schedule", "sqlaqueue_tick"}
    with project.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM sqlaqueue_schedule"))
    project.migrate(order())
    assert {*dump(project.engine)} == {"orders"}


def test_the_table_of_schedules_has_its_trigger(
    project: Project, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = order(PLAIN)
    Schedule("daily", model, every=timedelta(days=1), values={"article": "book"})
    project.migrate(model)
    found = dump(project.engine)
    assert found == wanted(project.engine, model, request, tmp_path)
    assert any("TRIGGER" in word or "_changed" in word for word in found["sqlaqueue_schedule"])
    project.downgrade("base")
    assert dump(project.engine) == {}


def test_duplicates_fail_a_migration_to_unique_jobs(project: Project) -> None:
    old, new = order(PLAIN), order(CONFIGS["unique"])
    project.migrate(old)
    insert(project.engine, "book", "book")
    project.revise(new)
    with pytest.raises(sa.exc.IntegrityError):
        project.upgrade()


def test_an_excluded_table_is_left_alone(project: Project) -> None:
    project.options["include_object"] = lambda object_, name, kind, *_: kind != "table" or name == "other"
    metadata = order(CONFIGS["unique"]).metadata
    sa.Table("other", metadata, sa.Column("id", sa.Integer, primary_key=True))
    text = project.migrate(metadata)
    assert re.findall(r"create_table\('(\w+)'", text) == ["other"]


@pytest.mark.parametrize("option", ["compare_server_default", "compare_type"])
def test_comparisons_of_alembic_find_no_difference(project: Project, option: str) -> None:
    project.options[option] = True
    model = order(CONFIGS["all_side_tables"])
    Schedule("daily", model, every=timedelta(days=1), values={"article": "book"})
    project.migrate(model)


def test_tables_that_create_all_has_made_are_no_difference(project: Project) -> None:
    for config in CONFIGS.values():
        model = order(config)
        Schedule("daily", model, every=timedelta(days=1), values={"article": "book"})
        model.metadata.create_all(project.engine)
        project.metadata = model.metadata
        command.stamp(project.config(), "head")
        project.check()
        model.metadata.drop_all(project.engine)


def test_a_column_that_a_migration_adds_is_that_of_create_table(engine: sa.Engine) -> None:
    column = sa.Column("at", sa.DateTime(timezone=True), server_default=sa.func.now())
    table = sa.Table("note", sa.MetaData(), column)
    created = str(CreateColumn(column).compile(engine))
    assert created in str(AddColumn(table.name, column).compile(engine))
    assert "now()" not in created
    assert "CURRENT_TIMESTAMP" not in created


def test_an_engine_that_is_not_prepared_is_refused(project: Project, place: str) -> None:
    from sqlaqueue.exc import ConfigurationError  # noqa: PLC0415

    project.engine = sa.create_engine(place)
    with pytest.raises(ConfigurationError, match=r"env.py: the engine is for .*engine = sqlaqueue\.prepare\("):
        project.revise(order(PLAIN))
    project.engine.dispose()


def waiting(kind: str, *, waits: bool = True) -> Any:
    """Return a class whose jobs wait for others; or the same class without, if ``waits`` is false."""
    none: dict[str, Any] = {} if waits else {"waits_for": (), "extra_columns": ()}
    made = make_batch(config=none) if kind == "batch" else make_dependent(on_failure="cancel", config=none)
    return made[0 if kind == "batch" else 1]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["batch", "dependent"])
def test_jobs_begin_to_wait_for_others_and_wait_no_more(
    project: Project, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The triggers, the indexes and the default of the status come and go; no job is left waiting."""
    plain, model = waiting(kind, waits=False), waiting(kind)
    table = plain.__table__
    project.migrate(plain)
    before = dump(project.engine)
    with project.engine.begin() as connection:
        connection.execute(sa.insert(table).values(id=1))
    project.migrate(model)
    assert dump(project.engine) == wanted(project.engine, model, request, tmp_path)
    status = sa.select(table.c.status).order_by(table.c.id)
    with project.engine.begin() as connection:
        connection.execute(sa.insert(table).values(id=2))
        assert connection.scalars(status).all() == ["pending", "waiting"]
    project.downgrade()
    assert dump(project.engine) == before
    with project.engine.begin() as connection:
        assert connection.scalars(status).all() == ["pending", "pending"]
    project.upgrade()
    with project.engine.begin() as connection:
        connection.execute(sa.insert(table).values(id=3))
    project.migrate(plain)
    assert dump(project.engine) == before
    with project.engine.begin() as connection:
        connection.execute(sa.insert(table).values(id=4))
        assert connection.scalars(status).all() == ["pending"] * 4
    project.downgrade("base")
    assert dump(project.engine) == {}


def test_a_copied_table_keeps_the_triggers_that_refer_to_it(project: Project) -> None:
    """SQLite copies a table to drop a column, and refuses to rename one to which the trigger of another refers."""
    batch, _ = make_batch(attributes={"more": mapped_column(sa.Integer)})
    project.migrate(batch)
    before = dump(project.engine)
    less, member = make_batch()
    project.migrate(less)
    project.downgrade()
    assert dump(project.engine) == before
    with Session(project.engine) as session:
        session.add_all([less(id=1, status="completed"), member(id=1, batch_id=1)])
        with pytest.raises((sa.exc.IntegrityError, sa.exc.OperationalError), match="takes no further Member"):
            session.commit()
