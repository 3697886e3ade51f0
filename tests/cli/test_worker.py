"""``sqlaqueue worker`` in processes of its own, with the signals of a service manager."""

import contextlib
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from sqlaqueue.cli import main
from sqlaqueue.cli.output import NOT_STOPPED
from sqlaqueue.cli.processes import REPORT_INTERVAL, PlainFormatter, WorkerOptions
from sqlaqueue.cli.supervisor import (
    LONGEST_RESTART_DELAY,
    STABLE_AFTER,
    Supervisor,
    WorkerSlot,
    _application_paths,
    exit_reason,
    restart_delay,
)
from tests.cli.conftest import EMAIL, LETTER, MODELS, QUEUES, ROW, SEND, WORKER, Shop, environment
from tests.cli.shop.models import Email, Letter, Row, Task
from tests.programs import Program, run_program, wait_until

pytestmark = pytest.mark.once


def drained(shop: Shop, *arguments: str, **environment: str | None) -> str:
    process = shop.start("worker", *arguments, "--drain", **environment)
    assert process.end() == 0, process.output
    assert "Traceback" not in process.output
    return process.output


@pytest.mark.parametrize(
    ("model", "handler"), [("Email", "send"), ("Letter", "send_async"), ("Row", "send_async"), ("Task", "send")]
)
def test_a_class_with_a_handler_of_each_kind(shop: Shop, model: str, handler: str) -> None:
    jobs = {
        "Email": [Email(), Email()],
        "Letter": [Letter(), Letter()],
        "Row": [Row(year=1, number="1"), Row(year=1, number="2")],
        "Task": [Task(), Task()],
    }[model]
    shop.add(*jobs)
    output = drained(shop, f"{MODELS}:{model}", "--handler", f"{MODELS}:{handler}", "--concurrency", "2")
    kind = "tasks" if handler == "send_async" else "threads"
    assert f"works on database {shop.database.name} at" in output
    assert f"with 2 worker {kind}, until no job is due" in output
    assert "finished runs: 2" in output
    assert sorted(shop.done().values()) == [1, 1]


def test_each_class_has_a_handler_of_its_own(shop: Shop) -> None:
    """In any order; a handler from the settings is for classes without one."""
    shop.add(Email(), Letter(), Row(year=1, number="1"))
    bound = (f"{MODELS}:Email={MODELS}:send", ROW, f"{MODELS}:Letter={MODELS}:send_async")
    drained(shop, *bound, "--handler", f"{MODELS}:send_async")
    assert sorted(queue for queue, _ in shop.done()) == ["email", "letter", "row"]
    shop.add(Email())
    drained(shop, f"{MODELS}:Email={MODELS}:send", SQLAQUEUE_WORKER_HANDLER=f"{MODELS}:fall_ill")
    assert shop.states("email") == {"completed": 2}


def test_garbage_collector_and_thread_switching_are_tuned(shop: Shop) -> None:
    """The garbage collector runs less often, and threads are switched more often."""
    shop.add(Email())
    output = drained(shop, EMAIL, "--handler", f"{MODELS}:log_interpreter_settings")
    assert "young: 50000 frozen: True switch: 0.001" in output


def test_several_queues_in_one_process(shop: Shop) -> None:
    shop.add(Email(), Email(), Letter(), Row(year=1, number="a"), Task())
    worker = shop.start(
        "worker",
        EMAIL,
        f"{QUEUES}:async_consumer",
        ROW,
        f"{QUEUES}:make",
        *(*SEND, "--handler", f"{MODELS}:send_async"),
    )
    everything = Counter([("email", "1"), ("email", "2"), ("letter", "1"), ("row", "1,a"), ("task", "1")])
    wait_until(lambda: shop.done() == everything, lambda: worker.output)
    assert shop.pids() == {worker.pid}
    worker.signal()
    assert worker.end() == 0, worker.output
    assert "Traceback" not in worker.output


def test_a_list_of_consumers_is_drained(shop: Shop) -> None:
    shop.add(Email(), Letter())
    assert "finished runs: 2" in drained(shop, f"{QUEUES}:both", SQLAQUEUE_URL=None)


A_LIST = f"from {QUEUES} import both as workers, consumer"
CONSUMERS = f"from {QUEUES} import async_consumer, consumer, nothing"
A_FUNCTION = f"""
from {QUEUES} import Consumer

def workers(unused=None) -> list[Consumer]:
    from {QUEUES} import both
    return both
"""


@pytest.mark.parametrize("code", [A_LIST, CONSUMERS, A_FUNCTION], ids=["list", "consumers", "function"])
def test_the_consumers_of_a_module(shop: Shop, code: str) -> None:
    shop.add(Email(), Letter())
    (shop.directory / "work.py").write_text(code)
    assert "finished runs: 2" in drained(shop, "work", SQLAQUEUE_URL=None)


@pytest.mark.parametrize("target", ["Email", "Letter"])
def test_a_paused_queue_is_drained(shop: Shop, target: str) -> None:
    """With a Consumer and with an AsyncConsumer."""
    shop.add(Email(), Letter())
    shop.ok("pause", f"{MODELS}:{target}")
    output = drained(shop, f"{QUEUES}:both", SQLAQUEUE_URL=None)
    assert f"WARNING queue {target.lower()}: paused, so none of its jobs is claimed" in output
    assert output.count(": paused, so") == 1
    assert "finished runs: 1" in output


def test_jobs_enqueued_by_a_handler_are_drained_as_well(shop: Shop) -> None:
    shop.add(Email())
    handlers = (*SEND, "--handler", f"{MODELS}:send_on")
    assert "finished runs: 2" in drained(shop, LETTER, EMAIL, *handlers)
    assert shop.done() == {("email", "1"): 1, ("letter", "1"): 1}


def test_a_consumer_that_cannot_start_stops_the_others(shop: Shop) -> None:
    worker = shop.start("worker", f"{QUEUES}:too_few_connections")
    assert worker.end() == 2
    assert "Error: Consumer(concurrency=3) needs 4 connections" in worker.output
    assert "Traceback" not in worker.output


def test_a_pool_that_is_too_small_for_all_consumers_is_refused(shop: Shop) -> None:
    worker = shop.start("worker", f"{QUEUES}:make_sharing")
    assert worker.end() == 2
    assert "need 4 connections, and its pool allows 3; use create_engine(..., pool_size=4)" in worker.output
    assert "Traceback" not in worker.output


def test_a_batch_handler(shop: Shop) -> None:
    shop.add(*(Email() for _ in range(5)))
    drained(shop, EMAIL, "--handler", f"{MODELS}:send_all", "--batch", "--batch-size", "3")
    assert sorted(shop.done()) == [("batch", "2"), ("batch", "3")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_handler_finishes_after_a_signal(shop: Shop, tmp_path: Path, number: signal.Signals) -> None:
    shop.add(Email(), Email())
    worker = shop.start("worker", EMAIL, "--handler", f"{MODELS}:send_slowly")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal(number)
    worker.wait_for(f"queue email: {number.name}: stopping, 1 running job to finish within 30 s, ")
    worker.wait_for("; a second signal aborts")
    (tmp_path / "go_on").touch()
    assert worker.end() == 0, worker.output
    assert shop.states("email") == {"completed": 1, "pending": 1}


@pytest.mark.parametrize("processes", [(), ("--processes", "1")])
@pytest.mark.parametrize("handler", ["send_slowly", "send_stubbornly"])
def test_jobs_are_released_after_the_grace_period(
    shop: Shop, tmp_path: Path, handler: str, processes: tuple[str, ...]
) -> None:
    """The process ends with an exit code that says so, although a thread or a task of it goes on."""
    shop.add(Email())
    worker = shop.start("worker", EMAIL, "--handler", f"{MODELS}:{handler}", "--grace", "100ms", *processes)
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal()
    assert worker.end() == NOT_STOPPED, worker.output
    assert f"stopped, but {MODELS}.{handler} (job 1, for" in worker.output
    assert shop.states("email") == {"pending": 1}
    assert shop.done() == {}


def test_a_handler_that_goes_on_does_not_keep_a_worker_that_fails(shop: Shop) -> None:
    """Another Consumer has failed before; waiting for the handler's event loop to close would never end."""
    shop.add(Letter())
    worker = shop.start("worker", f"{QUEUES}:make_failing")
    assert worker.end() == NOT_STOPPED, worker.output
    assert "no session" in worker.output


def test_a_worker_that_is_too_old_says_so_though_its_handler_goes_on(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    worker = shop.start("worker", EMAIL, "--handler", f"{MODELS}:send_slowly", "--grace", "100ms", "--concurrency", "2")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    shop.execute("COMMENT ON TABLE sqlaqueue_control IS 'sqlaqueue, as of 9.1, for 9.0 and newer'")
    # Its claims fail, so it looks at the versions before its next heartbeat.
    shop.execute('ALTER TABLE email RENAME COLUMN "to" TO address')
    assert worker.end() == NOT_STOPPED, worker.output
    assert worker.output.count("start the version of the program that has sqlaqueue 9.1") == 1
    assert "Traceback" not in worker.output


def test_a_second_signal_ends_the_worker_immediately(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    worker = shop.start("worker", EMAIL, "--handler", f"{MODELS}:send_slowly", "--grace", "1h")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal(signal.SIGINT)
    worker.wait_for("SIGINT: stopping")
    worker.signal(signal.SIGTERM)
    assert worker.end() == -signal.SIGTERM


def test_the_log_contains_no_password(shop: Shop) -> None:
    url = shop.database.url().replace("postgres@", "postgres:hush-hush@")
    output = drained(shop, EMAIL, *SEND, "--log-level", "debug", SQLAQUEUE_URL=url)
    assert f"works on database {shop.database.name}" in output
    assert "hush-hush" not in output


def test_verbose_logs_every_job(shop: Shop) -> None:
    shop.add(Email())
    assert "queue email: job 1: completed in" in drained(shop, EMAIL, *SEND, "-v")
    shop.add(Email())
    assert "completed" not in drained(shop, EMAIL, *SEND)


def test_each_line_of_a_json_log_is_an_object(shop: Shop) -> None:
    """Those of the supervisor and of its workers; those of a handler name its job."""
    shop.add(Email())
    worker = shop.start("worker", f"{EMAIL}={MODELS}:log", "--drain", "--processes=1", "--log-format=json")
    assert worker.end() == 0, worker.output
    records = [json.loads(line) for line in worker.output.splitlines()]
    assert {"process_started", "consumer_started", "drained"} <= {record.get("event") for record in records}
    (own,) = [record for record in records if record["logger"] == "shop"]
    assert (own["queue"], own["job_key"], own["attempt"], own["level"]) == ("email", 1, 1, "WARNING")


def test_lines_of_a_handler_name_its_job(shop: Shop) -> None:
    shop.add(Email())
    output = drained(shop, f"{EMAIL}={MODELS}:log")
    assert "WARNING queue email: job 1: at work\n" in output
    assert "\x1b" not in output


def test_only_a_terminal_shows_colors() -> None:
    record = logging.makeLogRecord({"name": "sqlaqueue", "msg": "late\x1b[2J", "levelno": 30, "levelname": "WARNING"})
    colored, plain = (PlainFormatter(colored=each).format(record) for each in (True, False))
    assert colored == f"\x1b[33m{plain}\x1b[0m"
    assert "\x1b" not in plain


# -- --processes: dead processes are restarted, and all stop at a signal ------------------------------------------


def pids(process: Program) -> dict[int, int]:
    """Return the current process IDs of the workers by number."""
    return {int(number): int(pid) for number, pid in re.findall(r"worker (\d+) is process (\d+)", process.output)}


def consumers(shop: Shop) -> int:
    return int(shop.json("stats", EMAIL)[0]["consumers"])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_share_the_jobs_and_stop_together(shop: Shop) -> None:
    supervisor = shop.start(*WORKER, "--processes", "3")
    wait_until(lambda: consumers(shop) == 3, lambda: supervisor.output)
    shop.add(*(Email() for _ in range(20)))
    wait_until(lambda: shop.states("email") == {"completed": 20}, lambda: supervisor.output)
    assert shop.pids() <= set(pids(supervisor).values())
    supervisor.signal()
    assert supervisor.end() == 0, supervisor.output
    assert "RuntimeWarning" not in supervisor.output
    assert not any(map(is_running, pids(supervisor).values()))
    assert shop.invoke("workers", EMAIL).exit_code == 1


def test_a_dead_process_is_restarted(shop: Shop) -> None:
    supervisor = shop.start(*WORKER, "--processes", "2")
    wait_until(lambda: len(pids(supervisor)) == 2, lambda: supervisor.output)
    wait_until(lambda: consumers(shop) == 2, lambda: supervisor.output)
    before = pids(supervisor)
    os.kill(before[2], signal.SIGKILL)
    supervisor.wait_for("worker 2 was killed by SIGKILL; restarting in 0.5 s")
    wait_until(lambda: pids(supervisor)[2] != before[2], lambda: supervisor.output)
    assert pids(supervisor)[1] == before[1]
    # A process that is stopped by a signal of its own is restarted as well.
    os.kill(before[1], signal.SIGTERM)
    supervisor.wait_for("worker 1 ended with exit code 0; restarting")
    wait_until(lambda: pids(supervisor)[1] != before[1], lambda: supervisor.output)
    supervisor.signal(signal.SIGINT)
    assert supervisor.end() == 0, supervisor.output


def test_a_job_that_kills_its_worker_does_not_end_the_supervisor(shop: Shop) -> None:
    shop.add(Letter())
    supervisor = shop.start("worker", LETTER, "--handler", f"{MODELS}:die", "--processes", "1")
    wait_until(lambda: shop.states("letter") == {"failed": 1}, lambda: supervisor.output)
    assert supervisor.output.count("was killed by SIGKILL") >= 2
    assert "restarting in 1.0 s" in supervisor.output
    supervisor.signal()
    assert supervisor.end() == 0


def test_handlers_finish_when_all_processes_receive_the_signal(shop: Shop, tmp_path: Path) -> None:
    """A service manager may send its signal to all processes of a service."""
    shop.add(Email())
    supervisor = shop.start("worker", EMAIL, "--handler", f"{MODELS}:send_slowly", "--processes", "1")
    wait_until((tmp_path / "at_work").exists, lambda: supervisor.output)
    for pid in (pids(supervisor)[1], supervisor.pid):
        os.kill(pid, signal.SIGTERM)
    supervisor.wait_for("SIGTERM: stopping")
    (tmp_path / "go_on").touch()
    assert supervisor.end() == 0, supervisor.output
    assert shop.states("email") == {"completed": 1}


def test_a_second_signal_kills_all_processes(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    supervisor = shop.start("worker", EMAIL, "--handler", f"{MODELS}:send_slowly", "--grace", "1h", "--processes", "2")
    wait_until((tmp_path / "at_work").exists, lambda: supervisor.output)
    supervisor.signal()
    supervisor.wait_for("SIGTERM: stopping")
    supervisor.signal(signal.SIGINT)
    assert supervisor.end() == -signal.SIGINT
    assert not any(map(is_running, pids(supervisor).values()))


def test_workers_stop_when_the_supervisor_is_killed(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    supervisor = shop.start("worker", EMAIL, "--handler", f"{MODELS}:send_slowly", "--processes", "1")
    wait_until((tmp_path / "at_work").exists, lambda: supervisor.output)
    supervisor.signal(signal.SIGKILL)
    (tmp_path / "go_on").touch()
    assert supervisor.end() == -signal.SIGKILL
    assert shop.states("email") == {"completed": 1}


def test_workers_stop_when_the_supervisor_is_killed_before_it_has_read_a_report(shop: Shop) -> None:
    supervisor = shop.start(*WORKER, "--processes", "1")
    wait_until(lambda: consumers(shop) == 1, lambda: supervisor.output)
    supervisor.signal(signal.SIGSTOP)
    time.sleep(2 * REPORT_INTERVAL)
    supervisor.signal(signal.SIGKILL)
    assert supervisor.end() == -signal.SIGKILL


def test_all_processes_drain_a_queue(shop: Shop) -> None:
    shop.add(*(Email() for _ in range(10)))
    supervisor = shop.start(*WORKER, "--processes", "2", "--drain")
    assert supervisor.end() == 0, supervisor.output
    assert shop.states("email") == {"completed": 10}


def test_a_worker_that_cannot_start_ends_the_supervisor_with_its_exit_code(shop: Shop) -> None:
    supervisor = shop.start("worker", EMAIL, "--handler", f"{MODELS}:sendd", "--processes", "4")
    assert supervisor.end() == 2
    assert supervisor.output.count("did you mean send?") == 1
    shop.execute("DROP TABLE email")
    supervisor = shop.start(*WORKER, "--processes", "4")
    assert supervisor.end() == 3
    assert supervisor.output.count("the database lacks what Email needs: the table email") == 1


MEETING = f"""
import os, time
from pathlib import Path
from {MODELS} import Email, send
Path(f"here-{{os.getpid()}}").touch()
deadline = time.monotonic() + 60
while len([*Path().glob("here-*")]) < 3:
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""


def test_processes_start_side_by_side(shop: Shop) -> None:
    """Each waits in its import until all of them are there."""
    (shop.directory / "meeting.py").write_text(MEETING)
    supervisor = shop.start("worker", "meeting:Email=meeting:send", "--processes", "3")
    wait_until(lambda: consumers(shop) == 3, lambda: supervisor.output)
    supervisor.signal()
    assert supervisor.end() == 0, supervisor.output


LONELY = f"""
from pathlib import Path
from {MODELS} import Email, send
Path("one").touch(exist_ok=False)
"""


def test_a_process_that_cannot_start_leaves_the_others_running(shop: Shop) -> None:
    (shop.directory / "lonely.py").write_text(LONELY)
    supervisor = shop.start("worker", "lonely:Email=lonely:send", "--processes", "3")
    wait_until(lambda: supervisor.output.count("ended with exit code 2") == 2, lambda: supervisor.output)
    assert supervisor.output.count("Error: lonely:Email: importing lonely failed: FileExistsError: ") == 1
    wait_until(lambda: consumers(shop) == 1, lambda: supervisor.output)
    supervisor.signal()
    assert supervisor.end() == 2, supervisor.output


def test_consumers_of_the_application_in_several_processes(shop: Shop) -> None:
    shop.add(Email(), Letter())
    assert shop.start("worker", f"{QUEUES}:both", "--processes", "1", "--drain").end() == 0
    assert sum(shop.done().values()) == 2


def test_the_password_is_not_on_a_command_line(shop: Shop) -> None:
    url = shop.database.url().replace("postgres@", "postgres:hush-hush@")
    supervisor = shop.start(*WORKER, "--processes", "1", SQLAQUEUE_URL=url)

    def shown() -> str:
        return subprocess.run(["/bin/ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout

    # Other tests may have workers of their own at the same time.
    wait_until(lambda: len(pids(supervisor)) == 1, lambda: supervisor.output)
    # A child has the command line of its parent until it executes its own program. `-ww`: otherwise ps cuts a line
    # at the width of the terminal.
    wait_until(lambda: "sqlaqueue.cli.supervised_worker" in shown(), lambda: supervisor.output)
    assert "hush-hush" not in shown()
    supervisor.signal()
    assert supervisor.end() == 0
    assert "hush-hush" not in supervisor.output


def test_restart_delays_grow_up_to_a_limit() -> None:
    assert [restart_delay(deaths) for deaths in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay(10_000) == LONGEST_RESTART_DELAY


def test_the_restart_delay_of_a_stable_worker_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    slot = WorkerSlot(1, None)  # type: ignore[arg-type] - no process is started here
    delays = []
    for ran in (0, 0, 0, STABLE_AFTER, 0):
        slot._started_at = now - ran
        slot.schedule_restart(1)
        delays.append(slot._next_start - now)
    assert delays == [0.5, 1, 2, 0.5, 1]


def test_exit_reasons() -> None:
    assert exit_reason(3) == "ended with exit code 3"
    assert exit_reason(-9) == "was killed by SIGKILL"
    assert exit_reason(-77) == "was killed by signal 77"


# -- --reload: the worker is restarted when the application changes -------------------------------------------------

RELOADED = """
import os, time
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlaqueue import Consumer, QueueMixin, prepare

class Base(DeclarativeBase):
    pass

class Page(QueueMixin, Base):
    __tablename__ = "page"
    id: Mapped[int] = mapped_column(primary_key=True)
    said: Mapped[str | None]

engine = prepare(sa.create_engine("sqlite:///pages.db"))
"""
WORKERS = """
from app import *

def write(session, page):
    {body}

workers = [Consumer(Page, write, sessionmaker(engine), grace=0.1, poll_interval=0.05)]
"""


class Pages:
    """An application with a database in a file, and a worker that is restarted when it changes."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._file = directory, directory / "pages.db"
        (directory / "app.py").write_text(RELOADED)
        self.write("open('at_work', 'w').close(); time.sleep(3600)")
        (directory / "tables.py").write_text("from app import *\nBase.metadata.create_all(engine)")
        made = run_program(directory / "tables.py", environment=environment(), directory=directory)
        assert made.returncode == 0, made.stderr

    def write(self, body: str) -> None:
        """Change the handler; written to another file first, as editors do."""
        new = self.directory / "workers.py.new"
        new.write_text(WORKERS.format(body=body))
        new.rename(self.directory / "workers.py")

    def add(self) -> None:
        with contextlib.closing(sqlite3.connect(self._file)) as connection, connection:
            connection.execute("INSERT INTO page DEFAULT VALUES")

    def said(self) -> list[str]:
        with contextlib.closing(sqlite3.connect(self._file)) as connection:
            rows = connection.execute("SELECT status, said FROM page ORDER BY id")
            return [f"{status}: {said}" for status, said in rows]


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(tmp_path)


def test_a_change_of_the_application_restarts_its_worker(pages: Pages) -> None:
    """The running job is released, as at the end of the grace period; an error while importing is waited out."""
    pages.add()
    arguments = ("worker", "workers:workers", "--reload")
    supervisor = Program("sqlaqueue", *arguments, environment=environment(), directory=pages.directory)
    try:
        wait_until((pages.directory / "at_work").exists, lambda: supervisor.output)
        pages.write("page.said = 'second'")
        supervisor.wait_for("workers.py changed; restarting")
        wait_until(lambda: pages.said() == ["completed: second"], lambda: supervisor.output)
        (pages.directory / "notes.txt").write_text("no part of the program")
        pages.write("page.said = 'third')")
        supervisor.wait_for("Error: workers:workers: importing workers failed: SyntaxError: unmatched ')'")
        supervisor.wait_for("worker 1 ended with exit code 2; waiting for a change of the files")
        pages.add()
        pages.write("page.said = 'the third'")
        wait_until(lambda: pages.said()[1:] == ["completed: the third"], lambda: supervisor.output)
        supervisor.signal(signal.SIGINT)
        assert supervisor.end() == 0, supervisor.output
    finally:
        supervisor.clear()
    assert len(re.findall(r"worker 1 is process \d+", supervisor.output)) == 4
    assert "Traceback" not in supervisor.output


def test_the_directories_that_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one, and those of modules that are elsewhere."""
    here, package, module = [tmp_path / name for name in ("here", "there/a_package", "elsewhere")]
    for directory in (here, package, module):
        directory.mkdir(parents=True)
    (here / "in_here.py").touch()
    (package / "__init__.py").write_text("raise AssertionError('it is imported')")
    (module / "a_module.py").touch()
    monkeypatch.chdir(here)
    for directory in (here, package.parent, module):
        monkeypatch.syspath_prepend(directory)
    options = WorkerOptions(
        targets=["in_here:Email=a_package.tasks:send", "a_package", "sys:path", "nothing:there", "no.name/at:all", ""],
        handlers=["a_module:send"],
    )
    assert _application_paths(options) == [here, package, module]


@pytest.mark.parametrize(
    ("is_started", "code", "waits"), [(False, 2, True), (False, -9, True), (False, 3, False), (True, -9, False)]
)
def test_what_no_change_of_the_files_helps_against_is_tried_again(*, is_started: bool, code: int, waits: bool) -> None:
    """A database that does not answer, and a death of a worker that has started."""
    supervisor = Supervisor(WorkerOptions(targets=[]), 1, changes=iter(()))
    (slot,) = supervisor._slots
    slot.is_started = is_started
    supervisor._handle_exit(slot, code)
    assert (slot.waits_for_change, slot.closed) == (waits, False)
    assert (slot._next_start > time.monotonic()) is not waits


@pytest.mark.parametrize(("code", "starts_again"), [(-9, True), (3, False)])
def test_a_process_that_is_killed_before_it_has_started_is_started_again(*, code: int, starts_again: bool) -> None:
    """Memory may be short for a moment; an exit code says that the next one would end likewise."""
    supervisor = Supervisor(WorkerOptions(targets=[]), 1)
    (slot,) = supervisor._slots
    supervisor._handle_exit(slot, code)
    assert slot.closed is not starts_again
    assert (slot._next_start > time.monotonic()) is starts_again


def test_reload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*more: str) -> str:
        result = CliRunner().invoke(main, [*WORKER, "--reload", *more])
        assert result.exit_code == 2
        return result.stderr

    monkeypatch.setitem(sys.modules, "watchfiles", None)
    assert refused("--drain") == "Error: --reload: a worker with --drain ends by itself; give one of the two\n"
    assert refused() == "Error: --reload needs watchfiles: pip install 'sqlaqueue[reload]'\n"


# -- --otel: the application sets OpenTelemetry up when it is imported --------------------------------------------

APP = """
import json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from tests.cli.shop.models import Email

class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as file:
            for span in spans:
                file.write(json.dumps([span.name, os.getpid()]) + "\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)
"""


@pytest.mark.parametrize("processes", [(), ("--processes", "1")], ids=["alone", "supervised"])
def test_a_worker_makes_spans(shop: Shop, processes: tuple[str, ...]) -> None:
    (shop.directory / "traced_app.py").write_text(APP)
    worker = shop.start("worker", f"traced_app:Email={MODELS}:send", "--otel", *processes)
    shop.add(Email())
    wait_until(lambda: shop.states("email") == {"completed": 1}, lambda: worker.output)
    worker.signal()
    assert worker.end() == 0, worker.output
    lines = [json.loads(line) for line in (shop.directory / "spans").read_text().splitlines()]
    assert sorted(name for name, _ in lines) == ["complete email", "process email", "receive email"]


def test_without_opentelemetry(shop: Shop) -> None:
    (shop.directory / "opentelemetry.py").write_text("raise ModuleNotFoundError('it is missing', name='opentelemetry')")
    worker = shop.start("worker", f"{MODELS}:Email={MODELS}:send", "--otel")
    assert worker.end() == 2
    assert "--otel: sqlaqueue.otel needs opentelemetry: pip install 'sqlaqueue[otel]'" in worker.output
