"""The soak finds what it looks for: lost jobs, effects that come twice, slow stops, and leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, cancel
from tests.conftest import SERVERS
from tests.servers import Database, Servers
from tests.soak import queues, samples, verdict
from tests.soak.__main__ import main
from tests.soak.queues import EFFECT, Mail
from tests.soak.run import Plan, run_piece, server_in
from tests.soak.samples import Checker, SampleFile


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url())
    queues.create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def checker(database: Database, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> Checker:
    monkeypatch.setattr(samples, "SETTLED_AFTER", 0)
    return Checker(database.dsn)


def add_mails(engine: sa.Engine, number: int) -> list[int]:
    with Session(engine) as session:
        mails = [Mail(kind="plain", customer=1) for _ in range(number)]
        session.add_all(mails)
        session.commit()
        return [mail.id for mail in mails]


def test_the_checker_finds_what_is_lost_and_what_comes_twice(engine: sa.Engine, checker: Checker) -> None:
    done, twice, again, lost, gone, cancelled = add_mails(engine, 6)
    Consumer(Mail, queues.handle, sessionmaker(engine)).drain()
    with engine.begin() as connection:
        # What the handler of each has added, changed into what a faulty queue would leave.
        connection.execute(EFFECT, {"queue": "mail", "job": twice, "due": None})
        without = sa.text("DELETE FROM soak_effect WHERE queue = 'mail' AND job = ANY(:jobs)")
        connection.execute(without, {"jobs": [lost, gone, cancelled]})
        connection.execute(sa.delete(Mail).where(Mail.id == gone))
        connection.execute(sa.update(Mail).where(Mail.id == cancelled).values(status="cancelled"))
    found = checker.look()
    assert (found["done"], found["open"]) == (4, 0)
    with engine.begin() as connection:
        connection.execute(EFFECT, {"queue": "mail", "job": again, "due": None})
    checker.look()
    checked = checker.checked
    assert checked.twice == [f"mail {twice}", f"mail {again}"]
    assert checked.lost == [
        f"mail {lost}: completed, without its effect",
        f"mail {gone}: no row, without its effect",
    ]
    assert checked.cancelled == 1
    assert done not in {lost, gone, cancelled}


def test_an_open_job_is_not_lost(engine: sa.Engine, checker: Checker) -> None:
    kept, cancelled = add_mails(engine, 2)
    with Session(engine) as session:
        session.execute(cancel(sa.select(Mail).where(Mail.id == cancelled)))
        session.commit()
    assert checker.look()["open"] == 1
    assert (checker.checked.lost, checker.checked.cancelled) == ([], 1)
    Consumer(Mail, queues.handle, sessionmaker(engine)).drain()
    found = checker.look()
    assert (found["open"], found["done"], len(found["latency"])) == (0, 1, 3)
    assert kept != cancelled


PLAN = {"seconds": 3600.0}
ENDED: dict[str, Any] = {"what": "ended", "piece": 0, "at": 3600.0, "done": 1, "cancelled": 0, "plan": PLAN}
ENDED |= {"lost": [], "twice": [], "unexpected": [], "left": {}}


def one_hour(figure: Callable[[float], float]) -> list[dict[str, Any]]:
    """Return samples of an hour: the descriptors of a worker, and memory that is flat after it has warmed up."""
    table = {"mail": {"dead": 10, "live": 5, "table_bytes": 2**20, "index_bytes": 2**21}}
    database = {"latency": [0.01, 0.1, 0.2], "connections": 30, "tables": table, "done": 50, "open": 3}
    made = []
    for second in range(10, 3600, 10):
        memory = min(second / 5, 60) + second % 7
        process = {"rss_mib": memory, "descriptors": figure(second), "threads": 9}
        made.append({"what": "sample", "piece": 0, "at": second, "processes": {"sync": process}, **database})
    return made


@pytest.mark.once
def test_a_leak_is_found_and_a_warm_up_is_none() -> None:
    flat, leaking = one_hour(lambda second: 20 + second % 5), one_hour(lambda second: 20 + second // 400)
    assert verdict.faults_of(ENDED, flat) == []
    assert verdict.faults_of(ENDED, leaking) == ["leak? sync: descriptors rose from 21.0 to 28.5 in 50 minutes"]
    assert verdict.faults_of({**ENDED, "plan": {"seconds": 60.0}}, leaking) == []


@pytest.mark.once
def test_a_slow_stop_and_lost_jobs_are_faults() -> None:
    stops = [{"what": "stop", "piece": 0, "process": "sync5", "seconds": s, "grace": 10.0} for s in (39.0, 41.0)]
    end = {**ENDED, "lost": ["mail 7: no row"], "twice": ["mail 8"], "left": {"mail": 2}, "unexpected": ["it ended"]}
    assert verdict.faults_of(end, stops) == [
        "lost: mail 7: no row",
        "its effect came twice: mail 8",
        "it ended",
        "open jobs of mail at the end: 2",
        "sync5 took 41 s to stop, its grace is 10 s",
    ]
    table = verdict.table([*one_hour(lambda _: 20), *stops, ENDED])
    assert "| graceful stops; median and longest, s | 2; 41.0, 41.0 |" in table
    assert "| sync: descriptors, line from, to | 20.0, 20.0 |" in table


@pytest.mark.once
def test_a_soak_that_is_cut_off_keeps_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.jsonl"
    SampleFile(path, 0).write("fault", {"kind": "kill"})
    with path.open("a") as file:
        file.write('{"what": "samp')
    assert [line["kind"] for line in samples.read(path)] == ["kill"]


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the number of hours, or --continue DIRECTORY"),
        (["1", "--continue", "d" * 70], "use a path of at most 70 characters"),
        (["0"], "give a number of hours above 0"),
        (["1", "--rate", "0"], "--rate: use a number above 0"),
        (["1", "--fault-every", "60", "20"], "--fault-every: give the least number of seconds first"),
    ],
)
def test_input_errors_are_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["soak", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.once
def test_half_a_minute(pytestconfig: pytest.Config, postgres_version: int, tmp_path: Path) -> None:
    """Faults every few seconds, without what takes longer to get over: nothing is lost, and nothing comes twice."""
    servers: Servers = pytestconfig.stash[SERVERS]
    home = servers.home / f"soak{postgres_version}"
    home.mkdir()
    path, plan = tmp_path / "samples.jsonl", Plan(seconds=25, rate=60, sample_every=2, fault_every=(4, 7), seed=5)
    with server_in(home, postgres_version, servers.bin_directories[postgres_version]) as server:
        run_piece(tmp_path, server, SampleFile(path, 0), plan)
    lines = [*samples.read(path)]
    [ended] = [line for line in lines if line["what"] == "ended"]
    wrong = verdict.faults_of(ended, lines)
    assert not wrong, "\n".join(wrong)
    assert ended["done"] > 100
    assert {"sync", "async", "producer", "operator", "monitor"} == lines[0]["processes"].keys()
    assert [line for line in lines if line["what"] == "fault"]
    assert "| jobs lost | 0 |" in verdict.table(lines)


@pytest.mark.once
def test_the_picture_has_all_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the session `soak` installs it")
    from tests.soak.picture import draw  # noqa: PLC0415 - it needs what may be missing

    more = [{**line, "piece": 1} for line in one_hour(lambda _: 20)]
    draw(
        [*one_hour(lambda _: 20), {"what": "fault", "piece": 0, "at": 7.0, "kind": "kill"}, *more],
        tmp_path / "soak.svg",
    )
    assert (tmp_path / "soak.svg").read_text().count('id="axes_') == 10
