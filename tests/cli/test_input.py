"""Input of users and of others: errors are one line that names the fix, and no text controls the terminal."""

import io
import json
import logging
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import click
import psycopg
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.admin import Explanation
from sqlaqueue.cli import apply_settings, main
from sqlaqueue.cli.database import parse_url, shown_url
from sqlaqueue.cli.processes import PlainFormatter
from sqlaqueue.exc import DatabaseNotReadyError
from tests.cli.conftest import EMAIL, LETTER, MODELS, QUEUES, ROW, SEND, WORKER, Shop
from tests.cli.shop import queues as app
from tests.cli.shop.models import Email, Row
from tests.schedules.models import start
from tests.servers import Server

pytestmark = pytest.mark.once

NOWHERE = "postgresql+psycopg://ada:hush-hush@localhost:1/shop"
SHOP = "tests.cli.shop"


def refused(*arguments: str, code: int = 2, **environment: str | None) -> str:
    """Run a command that must fail, and return its one line of output."""
    settings: dict[str, str | None] = {"SQLAQUEUE_URL": NOWHERE, **environment}
    result = CliRunner().invoke(main, arguments, env=settings, prog_name="sqlaqueue")
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "hush-hush" not in result.stderr
    said = result.stderr
    # Click prints the usage of the command before its own errors.
    if said.startswith("Usage:"):
        said = said.split("\n\n", 1)[1]
    assert said.startswith("Error: ")
    assert said.count("\n") == 1, said
    return said.removeprefix("Error: ").strip()


@pytest.mark.parametrize("command", ["stats", "worker"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_shop", "there is no module no_shop in the current directory"),
        ("app/models.py", "such as app.models; write a module as app.models, not as 'app/models.py'"),
        (f"{SHOP}.models:", "give module:attribute"),
        ("app/models.py:Email", "write a module as app.models, not as 'app/models.py'"),
        ("nobody.has:This", "there is no module nobody in the current directory"),
        (f"{SHOP}.modelz:Email", f"there is no module {SHOP}.modelz"),
        (f"{MODELS}:Emial", f"{MODELS} has no attribute Emial; did you mean Email?"),
        (f"{MODELS}:Qqqq", "no attribute Qqqq; its queues are Bare, Email, Letter, Newsletter, Row, Task"),
        (f"{MODELS}:Email.nothing", "has no attribute nothing"),
        (f"{MODELS}:NoQueue", "NoQueue is not a queue; let it inherit from sqlaqueue.QueueMixin"),
        (f"{MODELS}:QueueMixin", "QueueMixin is not mapped"),
        (f"{QUEUES}:Consumer", "name a queue class, a Consumer or AsyncConsumer, a list of them, or a function"),
        (f"{MODELS}:VALUE", "it is 7; name a queue class, a Consumer or AsyncConsumer"),
        (f"{MODELS}:without_arguments", "it is None; name a queue class"),
        (f"{MODELS}:send", "is called without arguments: missing a required argument: 'session'"),
        (f"{QUEUES}:make_for", "is called without arguments"),
        (f"{QUEUES}:make_async", "it is a coroutine function; let a plain function return"),
        (f"{QUEUES}:make_badly", "it raised ZeroDivisionError: "),
        (f"{QUEUES}:nothing", "it is empty"),
        (f"{QUEUES}:mixed", "it is 'letter'"),
    ],
)
def test_wrong_targets(command: str, target: str, said: str) -> None:
    assert said in refused(command, target, *(SEND if command == "worker" else ()))


@pytest.mark.parametrize("command", ["stats", "worker"])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 // 0", "importing broken_app failed: ZeroDivisionError: "),
        ("\n\n1 // 0", "broken_app.py, line 3)"),
        ("import a_package_that_nobody_has", "broken_app failed: ModuleNotFoundError: No module named 'a_package"),
        ("raise SystemExit('configure me')", "importing broken_app failed: SystemExit: configure me"),
    ],
)
def test_modules_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: str, said: str
) -> None:
    (tmp_path / "broken_app.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert said in refused(command, "broken_app:Email", *(SEND if command == "worker" else ()))


LISTS = f"""
from {QUEUES} import async_consumer, both, consumer
same = both
def make() -> "list[Consumer]":
    return both
def make_for(name: str) -> "list[Consumer]":
    raise NotImplementedError(name)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LISTS, "several lists or functions of Consumers; name one of them: some_app:both, some_app:make"),
        (f"from {MODELS} import Email, send", "the module has no Consumer; give it one, a list of them, or a function"),
        (f"from {QUEUES} import make_for, nothing, mixed, make", "the module has no Consumer"),
    ],
)
def test_modules_without_what_a_worker_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    (tmp_path / "some_app.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_app", raising=False)
    assert said in refused("worker", "some_app")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([EMAIL], "its handler is missing; write tests.cli.shop.models:Email=module:function, or give --handler"),
        ([EMAIL, LETTER, *SEND], "queue classes without a handler: 2 ("),
        ([EMAIL, "--handler", f"{MODELS}:sned"], f"{MODELS} has no attribute sned; did you mean send?"),
        ([EMAIL, "--handler", f"{MODELS}:VALUE"], "a handler is a callable, handler(session, job)"),
        ([EMAIL, "--handler", f"{MODELS}:without_arguments"], "is called as without_arguments(session, job)"),
        ([f"{QUEUES}:consumer", *SEND], "--handler: no effect on"),
        ([f"{QUEUES}:consumer={MODELS}:send"], "your Consumer has a handler already; remove the one given here"),
        ([f"{MODELS}:Email={MODELS}:send", *SEND], "queue classes without a handler: 0 (none), --handler: 1"),
        ([QUEUES, *SEND], "several lists or functions of Consumers; name one of them: "),
        ([f"{QUEUES}:consumer", "--concurrency", "2", "--batch"], "--concurrency, --batch: no effect on"),
        ([f"{QUEUES}:consumer", f"{QUEUES}:consumer"], "is named twice; raise its concurrency instead"),
        ([EMAIL, *SEND, "--poll-interval", "0"], "give more than zero seconds"),
        ([EMAIL, *SEND, "--lease", "1ms"], "a lease must be from one second"),
        ([EMAIL, *SEND, "--grace", "soon"], "'soon' is not a duration; write seconds, or 500ms"),
        ([EMAIL, *SEND, "--processes", "0"], "--processes"),
    ],
)
def test_wrong_arguments_of_worker(arguments: list[str], said: str) -> None:
    assert said in refused("worker", *arguments)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hush-hush", "this is not the URL of a database; write it as postgresql+psycopg://user:password@host"),
        ("postgresql://ada:hush-hush@host:port/shop", "this is not the URL of a database"),
        ("postgresql://ada:x@hush-hush@localhost/shop", "write an @ of the password as %40"),
        (
            "oracle://ada:hush-hush@localhost/shop",
            "oracle:// is not supported, sqlaqueue needs PostgreSQL, SQLite",
        ),
        ("postgresql+pg8000://ada:hush-hush@localhost/shop", "the driver 'pg8000' is not supported"),
    ],
)
@pytest.mark.parametrize("command", ["stats", "worker"])
def test_wrong_urls(command: str, url: str, said: str) -> None:
    assert said in refused(command, EMAIL, *(SEND if command == "worker" else ()), SQLAQUEUE_URL=url)
    assert said in refused("stats", EMAIL, "--url", url)


def test_a_missing_url() -> None:
    assert "the database is missing; give --url" in refused("stats", EMAIL, SQLAQUEUE_URL=None)
    assert "or set SQLAQUEUE_URL" in refused(*WORKER, SQLAQUEUE_URL=None)


def test_a_driver_that_does_not_fit_the_handler() -> None:
    url = "postgresql+{}://ada:hush-hush@localhost:1/shop"
    said = refused(*WORKER, SQLAQUEUE_URL=url.format("asyncpg"))
    assert said == "--url: asyncpg cannot be used with sync handlers; use postgresql+psycopg://"
    handler = ("--handler", f"{MODELS}:send_async")
    said = refused("worker", EMAIL, *handler, SQLAQUEUE_URL=url.format("psycopg2"))
    assert said == "--url: psycopg2 cannot be used with async handlers; use postgresql+psycopg://"


DRIVERS = ("psycopg", "psycopg2", "asyncpg")


def handler_of(command: str, driver: str) -> list[str]:
    if command != "worker":
        return []
    return ["--handler", f"{MODELS}:{'send_async' if driver == 'asyncpg' else 'send'}"]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("command", ["stats", "requeue", "worker"])
def test_a_database_that_does_not_answer(command: str, driver: str) -> None:
    for host in ("localhost:1", "nowhere.invalid"):
        url = f"postgresql+{driver}://ada:hush-hush@{host}/shop"
        said = refused(command, EMAIL, *handler_of(command, driver), code=3, SQLAQUEUE_URL=url)
        assert said.startswith("the database does not answer: ")


@pytest.fixture
def strict_server(postgres_server: Server) -> Server:
    """A server that requires a password."""
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE ROLE ada LOGIN PASSWORD 'right'")
    rules = postgres_server.data / "pg_hba.conf"
    rules.write_text(f"local all ada scram-sha-256\n{rules.read_text()}")
    postgres_server.restart()
    return postgres_server


@pytest.mark.parametrize("command", ["stats", "worker"])
def test_a_wrong_password(strict_server: Server, command: str) -> None:
    for driver in DRIVERS:
        url = strict_server.url(driver).replace("postgres@", "ada:hush-hush@")
        said = refused(command, EMAIL, *handler_of(command, driver), code=3, SQLAQUEUE_URL=url)
        assert 'password authentication failed for user "ada"' in said


def test_missing_tables(shop: Shop) -> None:
    shop.execute("DROP TABLE email, sqlaqueue_consumer")
    url = shop.database.url()
    for command in ("stats", "failed", "workers", "requeue", "cancel", "purge", "rescue"):
        said = refused(command, EMAIL, code=3, SQLAQUEUE_URL=url)
        assert said.startswith("the database lacks what Email needs: relation ")
        assert "`alembic revision --autogenerate" in said
    said = refused(*WORKER, code=3, SQLAQUEUE_URL=url)
    assert said.startswith(
        "the database lacks what Email needs: the table email, the table sqlaqueue_consumer; `alembic"
    )


def test_a_statement_that_fails(shop: Shop) -> None:
    shop.add(Email(status="failed"))
    shop.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$")
    shop.execute("CREATE TRIGGER refuse BEFORE UPDATE ON email EXECUTE FUNCTION refuse()")
    said = refused("requeue", EMAIL, "--yes", code=1, SQLAQUEUE_URL=shop.database.url())
    assert said == "the database failed: not today"


def test_a_key_of_another_type(shop: Shop) -> None:
    said = refused("requeue", EMAIL, "--key", "seven", SQLAQUEUE_URL=shop.database.url())
    assert said == "the key 'seven': Email.id is an integer, and 'seven' is not"


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.fixture
def project(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory below that of the file with the settings."""
    below = tmp_path / "src" / "app"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    monkeypatch.delenv("SQLAQUEUE_URL", raising=False)
    shop.add(Email(status="failed"), Email(status="completed"))
    return tmp_path / "pyproject.toml"


def found(*arguments: str, **environment: str) -> int:
    result = CliRunner().invoke(main, ["requeue", EMAIL, "--dry-run", "--json", *arguments], env=environment)
    assert result.exit_code == 0, result.output
    return int(json.loads(result.stdout)[0]["found"])


def test_options_override_the_environment_which_overrides_the_project(shop: Shop, project: Path) -> None:
    project.write_text(
        f'[tool.sqlaqueue]\nurl = "{shop.database.url()}"\n[tool.sqlaqueue.requeue]\nstate = ["completed"]\n'
    )
    shop.add(Email(status="completed"))
    assert found() == 2
    assert found(SQLAQUEUE_REQUEUE_STATE="failed completed") == 3
    assert found("--state", "failed", SQLAQUEUE_REQUEUE_STATE="failed completed") == 1
    result = CliRunner().invoke(main, ["stats", EMAIL], env={"SQLAQUEUE_URL": NOWHERE})
    assert result.exit_code == 3


def test_the_project_sets_options_of_the_worker(shop: Shop, project: Path) -> None:
    project.write_text(
        f'[tool.sqlaqueue]\nurl = "{shop.database.url()}"\n[tool.sqlaqueue.worker]\nhandler = ["{MODELS}:send"]\n'
        'batch-size = 7\ndrain = true\ngrace = "1m"\nlease = 30\n'
    )
    shop.add(Email())
    assert CliRunner().invoke(main, ["worker", EMAIL]).exit_code == 0
    assert shop.done() == {("email", "3"): 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.sqlaqueue]\nurll = 1", "[tool.sqlaqueue] urll: unknown setting; known are "),
        ("[tool.sqlaqueue.worker]\nbatches = 1", "[tool.sqlaqueue.worker] batches: unknown setting"),
        ("[tool.sqlaqueue.wroker]\nbatch = true", "[tool.sqlaqueue.wroker]: unknown command; known are worker"),
        ("[tool.sqlaqueue", "pyproject.toml: "),
        ("[tool]\nsqlaqueue = 1", "[tool.sqlaqueue] is 1; write a table"),
        ('[tool.sqlaqueue]\nworker = "app:send"', "write [tool.sqlaqueue.worker] and below it target = ..."),
        ("[tool.sqlaqueue]\ntarget = []", "[tool.sqlaqueue] target: write a text, or a list of texts"),
        ("[tool.sqlaqueue]\nurl = ['hush-hush']", "[tool.sqlaqueue] url: write a text or a number"),
        ("[tool.sqlaqueue.worker]\ndrain = 'no'", "[tool.sqlaqueue.worker] drain: write true or false"),
        ("[tool.sqlaqueue.worker]\nconcurrency = true", ".worker] concurrency: write a text or a number"),
        ("[tool.sqlaqueue.worker]\nconcurrency = 1.5", ".worker] concurrency: '1.5' is not a valid integer"),
        ("[tool.sqlaqueue.worker]\ngrace = 'soon'", "[tool.sqlaqueue.worker] grace: 'soon' is not a duration; write"),
        ("[tool.sqlaqueue.demo]\ntarget = 'app'", "[tool.sqlaqueue.demo] target: unknown setting"),
    ],
)
@pytest.mark.usefixtures("project")
def test_wrong_settings(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    section = re.match(r"\[tool\.sqlaqueue\.(worker|demo)\]", text)
    command = section[1] if section else "stats"
    assert said in refused(command, *([] if command == "demo" else [EMAIL]))


def test_wrong_settings_of_a_command_do_not_stop_others(shop: Shop, project: Path) -> None:
    project.write_text("[tool.sqlaqueue]\nlog-level = 'info'\n[tool.sqlaqueue.worker]\nbatches = 1\n")
    assert "email" in shop.ok("stats", EMAIL)
    assert "batches: unknown setting" in refused("worker", EMAIL)


def test_the_project_names_the_target(shop: Shop, project: Path) -> None:
    """An own one of a command comes before the one of all; the command line comes before both."""
    project.write_text(
        f'[tool.sqlaqueue]\nurl = "{shop.database.url()}"\ntarget = "{EMAIL}"\n'
        f'[tool.sqlaqueue.stats]\ntarget = ["{LETTER}", "{ROW}"]\n'
        f'[tool.sqlaqueue.worker]\ntarget = "{EMAIL}={MODELS}:send"\ndrain = true\nhandler = "{MODELS}:send"\n'
    )
    shop.add(Email())

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert [row["queue"] for row in json.loads(said("stats", "--json"))] == ["letter", "row"]
    assert [row["queue"] for row in json.loads(said("stats", EMAIL, "--json"))] == ["email"]
    assert "(no error)" in said("failed")
    assert said("job", "1").startswith("email 1 is failed")
    assert said("why", "1").startswith("email 1 is failed")
    assert said("why").startswith("email\n")
    assert said("why", LETTER).startswith("letter\n")
    assert said("pause") == "email is paused\n"
    assert said("resume", "tests.cli.shop.models").splitlines()[0] == "email is resumed"
    said("worker")
    assert shop.done() == {("email", "3"): 1}


def test_the_project_names_the_target_of_schedules(shop: Shop, project: Path) -> None:
    """What has no colon is a name then."""
    app.Base.metadata.create_all(shop.engine)
    start(shop.engine, app.schedules)
    project.write_text(f'[tool.sqlaqueue]\nurl = "{shop.database.url()}"\ntarget = "{QUEUES}:Report"\n')
    for name in (["nightly", "often"], ["often"], [f"{QUEUES}:Report", "nightly"]):
        result = CliRunner().invoke(main, ["schedules", "pause", *name])
        assert result.exit_code == 0, result.output
        assert result.stdout.count("paused") == len([each for each in name if ":" not in each])
    assert "nightly" in CliRunner().invoke(main, ["schedules", "show", "nightly"]).stdout
    project.write_text(f'[tool.sqlaqueue]\ntarget = ["{EMAIL}", "{ROW}"]\n')
    assert "this command takes one of them; name it" in refused("failed")
    project.write_text(f'[tool.sqlaqueue]\ntarget = "{EMAIL}"\n')
    assert "Missing argument 'KEY'" in refused("job")
    project.write_text("[tool.sqlaqueue]\n")
    assert "Missing argument 'TARGET'" in refused("failed")


def test_the_demo_ignores_the_url_of_the_project(project: Path) -> None:
    project.write_text('[tool.sqlaqueue]\nurl = "postgresql://ada:hush-hush@localhost:1/shop"\n')
    result = CliRunner().invoke(main, ["demo", "--path", str(project.parent), "--help"])
    assert result.exit_code == 0
    context = main.make_context("sqlaqueue", ["demo"])
    context.invoked_subcommand = "demo"
    apply_settings(context)
    assert context.default_map == {"demo": {}}
    context.invoked_subcommand = "stats"
    apply_settings(context)
    assert "url" in context.default_map["stats"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("command", ["stats", "worker"])
def test_an_option_that_the_driver_does_not_know(shop: Shop, driver: str, command: str) -> None:
    url = shop.database.url(driver)
    more = ["--drain"] if command == "worker" else []
    url += f"{'&' if '?' in url else '?'}nonsense=1"
    result = shop.invoke(command, EMAIL, *handler_of(command, driver), *more, "--url", url)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {2, 3}
    assert "nonsense" in result.output


def test_secrets_in_options_of_a_url_are_not_shown() -> None:
    url = parse_url("postgresql+psycopg://u:one@h/d?password=two&sslpassword=three&passfile=/four&sslmode=require")
    shown = shown_url(url)
    assert not [each for each in ("one", "two", "three", "four") if each in shown]
    assert "sslmode=require" in shown


# -- a role without privileges: one line with the missing GRANT, and an exit code ---------------------------------

OTHER_QUEUES = ("Letter", "Task")


@pytest.fixture
def role(shop: Shop) -> Iterator[str]:
    """Yield a role that may only connect."""
    role = f"role_{uuid.uuid4().hex[:8]}"
    shop.execute(f"CREATE ROLE {role} LOGIN")
    yield role
    shop.execute(f"DROP OWNED BY {role}")
    shop.execute(f"DROP ROLE {role}")


def url_of(shop: Shop, role: str) -> str:
    return shop.database.url().replace("postgres@", f"{role}@")


@pytest.mark.parametrize("name", ["Email", *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHER_QUEUES)])
def test_a_worker_without_privileges(shop: Shop, role: str, name: str) -> None:
    worker = shop.start("worker", f"{MODELS}:{name}", *SEND, SQLAQUEUE_URL=url_of(shop, role))
    assert worker.end() == 3, worker.output
    assert "INSERT INTO" not in worker.output
    errors = [line for line in worker.lines if " INFO " not in line]
    assert len(errors) == 1, worker.output
    assert errors[0].startswith(f"Error: the role of this Consumer of {name} lacks privileges that its queue needs;")
    assert "GRANT SELECT" in errors[0]


ARGUMENTS = {
    "stats": [],
    "failed": [],
    "workers": [],
    "pause": [],
    "resume": [],
    "cancel": ["--key", "1", "--yes"],
    "requeue": ["--key", "1", "--yes"],
    "purge": ["--older-than", "1d", "--yes"],
}


def test_a_consumer_without_privileges(shop: Shop, role: str, caplog: pytest.LogCaptureFixture) -> None:
    """The maintenance tasks log nothing, as the error is raised."""
    engine = sa.create_engine(url_of(shop, role), poolclass=sa.NullPool)
    consumer = Consumer(Email, lambda session, job: None, sessionmaker(engine))
    with pytest.raises(DatabaseNotReadyError, match="GRANT SELECT"):
        consumer.run()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "command",
    [each if each in {"stats", "cancel"} else pytest.param(each, marks=pytest.mark.thorough) for each in ARGUMENTS],
)
def test_a_command_without_privileges(shop: Shop, role: str, command: str) -> None:
    result = shop.invoke(command, EMAIL, *ARGUMENTS[command], SQLAQUEUE_URL=url_of(shop, role))
    assert result.exit_code == 3, result.output
    (line,) = result.stderr.splitlines()
    assert "permission denied for table" in line
    assert "GRANT" in line


# -- texts of others: they neither control a terminal nor forge lines of output or logs ---------------------------

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u2028forged\u202eline\nforged: line\x00"[:-1]
REPORT = f"{QUEUES}:Report"
KEY = f'1,"{HOSTILE}"'
COMMANDS = [
    ("jobs", ROW),
    ("jobs", EMAIL, "--state", "failed"),
    ("job", ROW, KEY),
    ("job", EMAIL, "1"),
    ("job", EMAIL, HOSTILE),
    ("failed", EMAIL),
    ("failed", ROW),
    ("stats", EMAIL),
    ("workers", EMAIL),
    ("health", EMAIL),
    ("why", EMAIL),
    ("why", EMAIL, "1"),
    ("why", ROW, KEY),
    ("why", ROW, f'2,"{HOSTILE}"'),
    ("doctor", EMAIL, ROW),
    ("doctor", EMAIL, ROW, "--deep"),
    ("schedules", "list", REPORT),
    ("schedules", "show", REPORT, HOSTILE),
    ("schedules", "pause", REPORT, HOSTILE),
    ("schedules", "show", REPORT, f"no{HOSTILE}"),
    ("pause", EMAIL),
    ("resume", EMAIL),
    ("reconcile", LETTER),
    ("rescue", EMAIL),
    ("requeue", ROW, "--key", KEY, "--yes"),
    ("cancel", ROW, "--key", KEY, "--yes"),
    ("purge", ROW, "--key", KEY, "--yes"),
]
OTHER_COMMANDS = {"alembic-template", "bench", "demo", "metrics", "scheduler", "web", "worker"}
"""Commands that print nothing of jobs, or in formats for programs, or through the log."""


@pytest.fixture
def hostile_shop(shop: Shop) -> Shop:
    app.Base.metadata.create_all(shop.engine)
    start(shop.engine, app.schedules)
    shop.execute(
        "UPDATE sqlaqueue_schedule SET name = :name WHERE name = (SELECT min(name) FROM sqlaqueue_schedule)",
        name=HOSTILE,
    )
    shop.add(
        Email(id=1, to=HOSTILE, status="failed", attempts=2, last_error=f"{HOSTILE}: {HOSTILE}", claimed_by=HOSTILE),
        Row(year=1, number=HOSTILE, status="failed", attempts=2, last_error=HOSTILE),
    )
    shop.execute(
        "INSERT INTO sqlaqueue_consumer"
        " (id, queue, name, host, pid, version, listening, running, heartbeat_at, expires_at)"
        " SELECT id, 'email', :name, :name, 1, :name, true, jsonb_build_array(jsonb_build_array(cast(:name AS text))),"
        " now(), now() + interval '1 hour' FROM unnest(ARRAY['x', 'y']) AS id",
        name=HOSTILE,
    )
    return shop


def assert_harmless(text: str) -> None:
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert [line for line in text.splitlines() if line.startswith("forged: line")] == []


@pytest.mark.few(9)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2])[:40])
def test_commands_print_no_control_characters(hostile_shop: Shop, command: tuple[str, ...]) -> None:
    result = hostile_shop.invoke(*command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert_harmless(result.output)


def test_all_commands_are_looked_at() -> None:
    assert {command[0] for command in COMMANDS} | OTHER_COMMANDS == {*main.list_commands(click.Context(main))}


def test_records_of_the_log_of_worker_processes_are_harmless() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter(colored=False))
    try:
        raise ValueError(HOSTILE)  # noqa: TRY301 - its traceback is logged
    except ValueError:
        record = logging.LogRecord("sqlaqueue", logging.ERROR, __file__, 1, "job %s failed", (HOSTILE,), sys.exc_info())
    record.stack_info = HOSTILE
    handler.handle(record)
    text = stream.getvalue()
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    first, *others = text.splitlines()
    assert " ERROR job a" in first
    assert "ValueError" in text
    assert all(line.startswith("  ") for line in others)


def test_an_explanation_as_a_text_is_harmless(hostile_shop: Shop) -> None:
    explanation = Explanation(queue="email", key=(HOSTILE,), state="missing", reasons=[])
    assert_harmless(str(explanation))
