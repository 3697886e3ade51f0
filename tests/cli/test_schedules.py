"""``sqlaqueue schedules`` and ``sqlaqueue scheduler``."""

import signal
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from sqlaqueue.admin import ScheduleAdmin
from sqlaqueue.exc import StatementError
from tests.cli.conftest import EMAIL, QUEUES, Shop
from tests.cli.shop import queues as app
from tests.programs import wait_until
from tests.schedules.models import fire_due, start

pytestmark = pytest.mark.once

REPORT = f"{QUEUES}:Report"


@pytest.fixture
def scheduled(shop: Shop) -> None:
    """The schedules of the shop are stored."""
    app.Base.metadata.create_all(shop.engine)
    start(shop.engine, app.schedules)
    fire_due(shop.engine, app.schedules)


def row(shop: Shop, name: str) -> dict[str, object]:
    [found] = shop.execute("SELECT row_to_json(s) FROM sqlaqueue_schedule s WHERE name = :name", name=name)
    return dict(found[0])


def test_the_list(shop: Shop, scheduled: None) -> None:
    said = shop.ok("schedules", "list", REPORT)
    first, second = said.splitlines()[1:]
    assert first.startswith("report  nightly  at 03:00 every day, Europe/Berlin  ")
    assert first.rstrip().endswith("the program  waiting")
    assert "every 5 min " in second
    found = shop.json("schedules", "list", f"{QUEUES}:scheduler")
    assert [each["name"] for each in found] == ["nightly", "often"]
    assert found[0]["cron"] == "0 3 * * *"


def test_nothing_and_no_tables(shop: Shop) -> None:
    app.Base.metadata.create_all(shop.engine)
    assert shop.ok("schedules", "list", f"{QUEUES}:schedules").startswith("no schedules; ")
    result = shop.invoke("schedules", "list", EMAIL, SQLAQUEUE_URL=shop.database.url())
    assert result.exit_code == 0
    shop.execute("DROP TABLE sqlaqueue_schedule")
    result = shop.invoke("schedules", "list", REPORT)
    assert result.exit_code == 3
    assert "lacks what Report needs" in result.stderr


def test_one_schedule_in_words_with_its_next_ticks(shop: Shop, scheduled: None) -> None:
    said = shop.ok("schedules", "show", f"{QUEUES}:nightly", "nightly", "-n", "3")
    assert said.startswith("nightly: at 03:00 every day, Europe/Berlin\n  enqueues Report in the queue report\n")
    assert 'values: {"kind": "sales"}' in said
    assert len(said.partition("next ticks:")[2].strip().splitlines()) == 3
    found = shop.json("schedules", "show", REPORT, "often")
    assert len(found["next_ticks"]) == 5


def test_it_is_changed(shop: Shop, scheduled: None) -> None:
    said = shop.ok(
        "schedules", "edit", REPORT, "often", "--cron", "*/20 * * * *", "--catch-up", "7", "--jitter", "30s",
        "--timezone", "Europe/Paris", "--misfire-grace", "2m", "--skip-unfinished",
    )  # fmt: skip
    assert said == "changed often\n"
    found = row(shop, "often")
    assert (found["cron"], found["every"], found["timezone"], found["catch_up"]) == (
        "*/20 * * * *",
        None,
        "Europe/Paris",
        7,
    )
    assert (found["jitter"], found["misfire_grace"], found["skip_unfinished"]) == ("00:00:30", "00:02:00", True)
    assert found["values"] == {"kind": "stock", "day": "2026-01-02"}
    assert "the program, edited" in shop.ok("schedules", "list", REPORT)
    shop.ok("schedules", "edit", REPORT, "often", "--every", "90", "--no-skip-unfinished", "--catch-up", "skip")
    assert (row(shop, "often")["cron"], row(shop, "often")["every"]) == (None, "00:01:30")
    shop.ok("schedules", "edit", REPORT, "often", "--misfire-grace", "default", "--catch-up", "latest")
    assert row(shop, "often")["misfire_grace"] is None
    assert shop.ok("schedules", "reset", REPORT, "often") == "often is as the program declares it\n"
    assert row(shop, "often")["every"] == "00:05:00"


def test_it_is_added_and_removed(shop: Shop, scheduled: None) -> None:
    values = ["--value", "kind=5", "--value", "size=5", "--value", "day=2026-02-03"]
    assert shop.ok("schedules", "add", REPORT, "each", "--cron", "@daily", *values) == "added each\n"
    assert row(shop, "each")["values"] == {"kind": "5", "size": 5, "day": "2026-02-03"}
    assert "added at run time" in shop.ok("schedules", "list", REPORT)
    assert shop.invoke("schedules", "add", REPORT, "each", "--cron", "@daily", *values).exit_code == 2
    assert shop.invoke("schedules", "reset", REPORT, "each").exit_code == 2
    assert shop.ok("schedules", "remove", REPORT, "each", "often") == "each is removed\noften is removed\n"
    assert [each["name"] for each in shop.json("schedules", "list", REPORT)] == ["nightly"]


def test_it_is_paused_resumed_and_run(shop: Shop, scheduled: None) -> None:
    assert shop.ok("schedules", "pause", REPORT, "often", "nightly") == "often is paused\nnightly is paused\n"
    before = row(shop, "often")["paused_at"]
    shop.ok("schedules", "pause", REPORT, "often")
    assert row(shop, "often")["paused_at"] == before
    assert "paused" in shop.ok("schedules", "show", REPORT, "often")
    assert shop.ok("schedules", "run", REPORT, "often") == "often will be fired by a running process\n"
    assert len(fire_due(shop.engine, app.schedules)) == 1
    assert shop.ok("schedules", "resume", REPORT, "often") == "often is resumed\n"
    fire_due(shop.engine, app.schedules)
    assert row(shop, "often")["next_tick"] is not None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["pause", REPORT, "nope"], "there is no schedule 'nope'; there are 'nightly', 'often'"),
        (["show", REPORT, "nope"], "there is no schedule 'nope'"),
        (["edit", REPORT, "often"], "give at least one option to change"),
        (["edit", REPORT, "often", "--cron", "61 * * * *"], "cron='61 * * * *': bad minute"),
        (["edit", REPORT, "often", "--timezone", "Mars"], "timezone='Mars'"),
        (["edit", REPORT, "often", "--value", "kind"], "--value kind: write ATTRIBUTE=VALUE"),
        (["edit", REPORT, "often", "--value", "knd=5"], "Report has no column attribute 'knd'"),
        (["edit", REPORT, "often", "--value", "day=x"], "this is no value of Report.day"),
        (["edit", REPORT, "often", "--catch-up", "many"], "catch_up='many'"),
        (["add", REPORT, "x", "--every", "5m"], "Report.kind cannot be NULL and has no default"),
        (["add", REPORT, "x", "--value", "kind=x"], "give either cron= or every="),
        (["list", f"{QUEUES}:timedelta"], "timedelta is not a queue"),
        (["list", "tests.cli.shop"], "the module has no queue class and no Consumer"),
    ],
)
def test_wrong_input_gets_one_line(shop: Shop, scheduled: None, arguments: list[str], text: str) -> None:
    result = shop.invoke("schedules", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_settings_apply_to_the_commands_of_the_group(
    shop: Shop, scheduled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shop.database.url()
    (shop.directory / "pyproject.toml").write_text(
        f'[tool.sqlaqueue]\nurl = "{url}"\n[tool.sqlaqueue.schedules]\nticks = 2\n'
    )
    monkeypatch.chdir(shop.directory)
    said = shop.ok("schedules", "show", REPORT, "often", SQLAQUEUE_URL=None)
    assert len(said.partition("next ticks:")[2].strip().splitlines()) == 2
    (shop.directory / "pyproject.toml").write_text("[tool.sqlaqueue.schedules]\ntcks = 2\n")
    assert "unknown setting" in shop.invoke("schedules", "list", REPORT).stderr


@pytest.mark.parametrize(
    ("targets", "driver"), [([f"{QUEUES}:nightly", f"{QUEUES}:schedules"], "psycopg"), ([REPORT], "asyncpg")]
)
def test_a_process_that_fires_schedules(shop: Shop, scheduled: None, targets: list[str], driver: str) -> None:
    url = shop.database.url(driver)  # type: ignore[arg-type] # one of the drivers
    process = shop.start("scheduler", *targets, "--log-level", "debug", SQLAQUEUE_URL=url)
    process.wait_for("schedules: started")
    shop.ok("schedules", "run", REPORT, "often")
    wait_until(lambda: shop.states("report") == {"pending": 1}, lambda: process.output)
    process.signal(signal.SIGTERM)
    assert process.end() == 0
    assert "schedules: stopped" in process.output


MODULES = {
    "a_scheduler": f"from {QUEUES} import nightly, scheduler as mine\nthe_same = mine",
    "schedules": f"from {QUEUES} import nightly, schedules",
    "classes": f"from {QUEUES} import Report",
}


@pytest.mark.parametrize("name", MODULES)
def test_the_schedules_of_a_module(shop: Shop, scheduled: None, name: str) -> None:
    (shop.directory / f"{name}.py").write_text(MODULES[name])
    process = shop.start("scheduler", name, **({"SQLAQUEUE_URL": None} if name == "a_scheduler" else {}))
    process.wait_for("schedules: started")
    process.signal(signal.SIGTERM)
    assert process.end() == 0, process.output
    listed = shop.start("schedules", "list", name)
    assert listed.end() == 0, listed.output
    assert "nightly" in listed.output


@pytest.mark.parametrize("name", ["scheduler", "async_scheduler"])
def test_the_scheduler_of_an_application(shop: Shop, scheduled: None, name: str) -> None:
    shop.ok("schedules", "edit", REPORT, "nightly", "--every", "1")
    process = shop.start("scheduler", f"{QUEUES}:{name}", "--reset", SQLAQUEUE_URL=None)
    process.wait_for("schedule 'nightly': written")
    assert row(shop, "nightly")["cron"] == "0 3 * * *"
    process.signal(signal.SIGINT)
    assert process.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([f"{QUEUES}:scheduler", f"{QUEUES}:nightly"], 2, "your Scheduler has its schedules and its database"),
        ([QUEUES], 2, f"several Schedulers; name one of them: {QUEUES}:scheduler, {QUEUES}:async_scheduler"),
        ([f"{QUEUES}:URL"], 2, "this is no Schedule, and no queue class"),
        ([f"{QUEUES}:nightly", "--url", "mssql://x/y"], 2, "is not supported"),
    ],
)
def test_wrong_targets_of_a_process(shop: Shop, arguments: list[str], code: int, text: str) -> None:
    result = shop.invoke("scheduler", *arguments)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


def test_a_process_without_tables_or_url_ends(shop: Shop) -> None:
    result = shop.invoke("scheduler", f"{QUEUES}:nightly")
    assert result.exit_code == 3
    assert "the table sqlaqueue_schedule" in result.stderr
    nowhere = "postgresql+psycopg://nobody@localhost:1/nowhere"
    result = shop.invoke("scheduler", f"{QUEUES}:nightly", "--url", nowhere)
    assert result.exit_code == 3
    assert "the database does not answer" in result.stderr
    result = shop.invoke("scheduler", f"{QUEUES}:nightly", SQLAQUEUE_URL=None)
    assert (result.exit_code, "the database is missing" in result.stderr) == (2, True)


def test_what_python_changes(shop: Shop, scheduled: None) -> None:
    engine = shop.engine
    with Session(engine) as session:
        admin = ScheduleAdmin(session, app.Report)
        admin.edit("often", every=timedelta(hours=1), values={"kind": "x"})
        info = admin.get("often")
        assert (info.every, info.values, info.origin) == (timedelta(hours=1), {"kind": "x"}, "edited")
        with pytest.raises(StatementError, match="what can be changed is cron"):
            admin.edit("often", factory="x")
        fire_due(engine, app.schedules)
        info = admin.get("often")
        assert info.next_ticks(2)[1] - info.next_ticks(2)[0] == timedelta(hours=1)
