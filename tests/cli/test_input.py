"""Errors of the command line: one line that names the fix, and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from sqlaqueue.cli import main
from sqlaqueue.cli.database import parse_url, shown_url
from tests.cli.conftest import MODELS, QUEUES, TASKS, Shop
from tests.cli.shop.models import Email
from tests.servers import Server

pytestmark = pytest.mark.once

NOWHERE = "postgresql+psycopg://ada:hush-hush@localhost:1/shop"
SHOP = "tests.cli.shop"
HANDLER = ("--handler", f"{TASKS}:send")


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
        ("shop", "'shop': give module:attribute, such as app.models:Email"),
        (f"{SHOP}.models:", "give module:attribute"),
        ("app/models.py:Email", "write a module as app.models, not as 'app/models.py'"),
        ("nobody.has:This", "there is no module nobody in the current directory"),
        (f"{SHOP}.modelz:Email", f"there is no module {SHOP}.modelz"),
        (f"{SHOP}.broken:Email", f"importing {SHOP}.broken failed: ZeroDivisionError: "),
        (f"{SHOP}.broken:Email", "broken.py, line 3)"),
        (f"{SHOP}.needing:Email", f"importing {SHOP}.needing failed: ModuleNotFoundError: No module named 'a_package"),
        (f"{SHOP}.quitting:Email", f"importing {SHOP}.quitting failed: SystemExit: configure me"),
        (f"{MODELS}:Emial", f"{MODELS} has no attribute Emial; did you mean Email?"),
        (
            f"{MODELS}:Qqqq",
            "no attribute Qqqq; its queues are Bare, Email, Letter, Newsletter, Row, Task",
        ),
        (f"{MODELS}:Email.nothing", "has no attribute nothing"),
        (f"{MODELS}:NoQueue", "NoQueue is not a queue; let it inherit from sqlaqueue.QueueMixin"),
        (f"{MODELS}:QueueMixin", "QueueMixin is not mapped"),
        (f"{QUEUES}:Consumer", "name a queue class, a Consumer or AsyncConsumer, a list of them, or a function"),
        (f"{TASKS}:VALUE", "it is 7; name a queue class, a Consumer or AsyncConsumer"),
        (f"{TASKS}:without_arguments", "it is None; name a queue class"),
        (f"{TASKS}:send", "is called without arguments: missing a required argument: 'session'"),
        (f"{QUEUES}:make_for", "is called without arguments"),
        (f"{QUEUES}:make_async", "it is a coroutine function; let a plain function return"),
        (f"{QUEUES}:make_badly", "it raised ZeroDivisionError: "),
        (f"{QUEUES}:nothing", "it is empty"),
        (f"{QUEUES}:mixed", "it is 'letter'"),
    ],
)
def test_wrong_targets(command: str, target: str, said: str) -> None:
    assert said in refused(command, target, *(HANDLER if command == "worker" else ()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [f"{MODELS}:Email"],
            "its handler is missing; write tests.cli.shop.models:Email=module:function, or give --handler",
        ),
        (
            [f"{MODELS}:Email", f"{MODELS}:Letter", *HANDLER],
            "queue classes without a handler: 2 (",
        ),
        ([f"{MODELS}:Email", "--handler", f"{TASKS}:sned"], f"{TASKS} has no attribute sned; did you mean send?"),
        ([f"{MODELS}:Email", "--handler", f"{TASKS}:VALUE"], "a handler is a callable, handler(session, job)"),
        (
            [f"{MODELS}:Email", "--handler", f"{TASKS}:without_arguments"],
            "is called as without_arguments(session, job)",
        ),
        ([f"{QUEUES}:consumer", *HANDLER], "--handler: no effect on"),
        ([f"{QUEUES}:consumer={TASKS}:send"], "your Consumer has a handler already; remove the one given here"),
        ([f"{MODELS}:Email={TASKS}:send", *HANDLER], "queue classes without a handler: 0 (none), --handler: 1"),
        ([f"{QUEUES}:consumer", "--concurrency", "2", "--batch"], "--concurrency, --batch: no effect on"),
        ([f"{QUEUES}:consumer", f"{QUEUES}:consumer"], "is named twice; raise its concurrency instead"),
        ([f"{MODELS}:Email", *HANDLER, "--poll-interval", "0"], "give more than zero seconds"),
        ([f"{MODELS}:Email", *HANDLER, "--lease", "1ms"], "a lease must be from one second"),
        ([f"{MODELS}:Email", *HANDLER, "--grace", "soon"], "'soon' is not a duration; write seconds, or 500ms"),
        ([f"{MODELS}:Email", *HANDLER, "--processes", "0"], "--processes"),
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
        ("oracle://ada:hush-hush@localhost/shop", "oracle:// is not supported, sqlaqueue needs PostgreSQL"),
        ("postgresql+pg8000://ada:hush-hush@localhost/shop", "the driver 'pg8000' is not supported"),
    ],
)
@pytest.mark.parametrize("command", ["stats", "worker"])
def test_wrong_urls(command: str, url: str, said: str) -> None:
    assert said in refused(command, f"{MODELS}:Email", *(HANDLER if command == "worker" else ()), SQLAQUEUE_URL=url)
    assert said in refused("stats", f"{MODELS}:Email", "--url", url)


def test_a_missing_url() -> None:
    assert "the database is missing; give --url" in refused("stats", f"{MODELS}:Email", SQLAQUEUE_URL=None)
    assert "or set SQLAQUEUE_URL" in refused("worker", f"{MODELS}:Email", *HANDLER, SQLAQUEUE_URL=None)


def test_a_driver_that_does_not_fit_the_handler() -> None:
    url = "postgresql+{}://ada:hush-hush@localhost:1/shop"
    said = refused("worker", f"{MODELS}:Email", *HANDLER, SQLAQUEUE_URL=url.format("asyncpg"))
    assert said == "--url: asyncpg cannot be used with sync handlers; use postgresql+psycopg://"
    handler = ("--handler", f"{TASKS}:send_async")
    said = refused("worker", f"{MODELS}:Email", *handler, SQLAQUEUE_URL=url.format("psycopg2"))
    assert said == "--url: psycopg2 cannot be used with async handlers; use postgresql+psycopg://"


DRIVERS = ("psycopg", "psycopg2", "asyncpg")


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("command", ["stats", "requeue", "worker"])
def test_a_database_that_does_not_answer(command: str, driver: str) -> None:
    handler = () if command != "worker" else ("--handler", f"{TASKS}:send{'_async' if driver == 'asyncpg' else ''}")
    for host in ("localhost:1", "nowhere.invalid"):
        url = f"postgresql+{driver}://ada:hush-hush@{host}/shop"
        said = refused(command, f"{MODELS}:Email", *handler, code=3, SQLAQUEUE_URL=url)
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
        handler = () if command != "worker" else ("--handler", f"{TASKS}:send{'_async' if driver == 'asyncpg' else ''}")
        said = refused(command, f"{MODELS}:Email", *handler, code=3, SQLAQUEUE_URL=url)
        assert 'password authentication failed for user "ada"' in said


def test_missing_tables(shop: Shop) -> None:
    shop.execute("DROP TABLE email, sqlaqueue_consumer")
    url = shop.database.url()
    for command in ("stats", "failed", "workers", "requeue", "cancel", "purge", "rescue"):
        said = refused(command, f"{MODELS}:Email", code=3, SQLAQUEUE_URL=url)
        assert said.startswith("the database lacks what Email needs: relation ")
        assert "`alembic revision --autogenerate" in said
    said = refused("worker", f"{MODELS}:Email", *HANDLER, code=3, SQLAQUEUE_URL=url)
    assert said.startswith(
        "the database lacks what Email needs: the table email, the table sqlaqueue_consumer; `alembic"
    )


def test_a_statement_that_fails(shop: Shop) -> None:
    shop.add(Email(status="failed"))
    shop.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$")
    shop.execute("CREATE TRIGGER refuse BEFORE UPDATE ON email EXECUTE FUNCTION refuse()")
    said = refused("requeue", f"{MODELS}:Email", "--yes", code=1, SQLAQUEUE_URL=shop.database.url())
    assert said == "the database failed: not today"


def test_a_key_of_another_type(shop: Shop) -> None:
    said = refused("requeue", f"{MODELS}:Email", "--key", "seven", SQLAQUEUE_URL=shop.database.url())
    assert said == "the key 'seven': Email.id is an integer, and 'seven' is none"


# -- settings -------------------------------------------------------------------------------------------------------


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
    result = CliRunner().invoke(
        main, ["requeue", f"{MODELS}:Email", "--dry-run", "--json", *arguments], env=environment
    )
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
    result = CliRunner().invoke(main, ["stats", f"{MODELS}:Email"], env={"SQLAQUEUE_URL": NOWHERE})
    assert result.exit_code == 3


def test_the_project_sets_options_of_the_worker(shop: Shop, project: Path) -> None:
    project.write_text(
        f'[tool.sqlaqueue.worker]\nhandler = ["{TASKS}:send"]\nbatch-size = 7\ndrain = true\ngrace = "1m"\nlease = 30\n'
        f'[tool.sqlaqueue]\nurl = "{shop.database.url()}"\n'
    )
    shop.add(Email())
    assert CliRunner().invoke(main, ["worker", f"{MODELS}:Email"]).exit_code == 0
    assert shop.done() == {("email", "3"): 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.sqlaqueue]\nurll = 1", "[tool.sqlaqueue] urll: unknown setting; known are "),
        ("[tool.sqlaqueue.worker]\nbatches = 1", "[tool.sqlaqueue.worker] batches: unknown setting"),
        (
            "[tool.sqlaqueue.wroker]\nbatch = true",
            "[tool.sqlaqueue.wroker]: unknown command; known are worker",
        ),
        ("[tool.sqlaqueue", "pyproject.toml: "),
    ],
    ids=["setting", "setting of a command", "command", "no TOML"],
)
@pytest.mark.usefixtures("project")
def test_wrong_settings(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert said in refused("stats", f"{MODELS}:Email")


def test_the_demo_ignores_the_url_of_the_project(project: Path) -> None:
    project.write_text('[tool.sqlaqueue]\nurl = "postgresql://ada:hush-hush@localhost:1/shop"\n')
    result = CliRunner().invoke(main, ["demo", "--path", str(project.parent), "--help"])
    assert result.exit_code == 0
    from sqlaqueue.cli import apply_settings  # noqa: PLC0415 - needed by this test only

    context = main.make_context("sqlaqueue", ["demo"])
    apply_settings(context)
    assert context.default_map is not None
    assert context.default_map["demo"] == {}
    assert "url" in context.default_map["stats"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("command", ["stats", "worker"])
def test_an_option_that_the_driver_does_not_know(shop: Shop, driver: str, command: str) -> None:
    url = shop.database.url(driver)
    handler = f"{TASKS}:{'send_async' if driver == 'asyncpg' else 'send'}"
    more = ["--handler", handler, "--drain"] if command == "worker" else []
    url += f"{'&' if '?' in url else '?'}nonsense=1"
    result = shop.invoke(command, f"{MODELS}:Email", *more, "--url", url)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {2, 3}
    assert "nonsense" in result.output


def test_secrets_in_options_of_a_url_are_not_shown() -> None:
    url = parse_url("postgresql+psycopg://u:one@h/d?password=two&sslpassword=three&passfile=/four&sslmode=require")
    shown = shown_url(url)
    assert not [each for each in ("one", "two", "three", "four") if each in shown]
    assert "sslmode=require" in shown
