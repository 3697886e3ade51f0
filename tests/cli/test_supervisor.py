"""``sqlaqueue worker --processes``: it restarts dead processes, and stops at a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sqlaqueue.cli.processes import REPORT_INTERVAL
from sqlaqueue.cli.supervisor import LONGEST_RESTART_DELAY, STABLE_AFTER, WorkerSlot, exit_reason, restart_delay
from tests.cli.conftest import MODELS, QUEUES, TASKS, Shop
from tests.cli.shop.models import Email, Letter
from tests.programs import Program, wait_until

pytestmark = pytest.mark.once

SEND = ("worker", f"{MODELS}:Email", "--handler", f"{TASKS}:send")


def pids(process: Program) -> dict[int, int]:
    """Return the current process IDs of the workers by number."""
    return {int(number): int(pid) for number, pid in re.findall(r"worker (\d+) is process (\d+)", process.output)}


def consumers(shop: Shop) -> int:
    return int(shop.json("stats", f"{MODELS}:Email")[0]["consumers"])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_share_the_jobs_and_stop_together(shop: Shop) -> None:
    supervisor = shop.start(*SEND, "--processes", "3")
    wait_until(lambda: consumers(shop) == 3, lambda: supervisor.output)
    shop.add(*(Email() for _ in range(20)))
    wait_until(lambda: shop.states("email") == {"completed": 20}, lambda: supervisor.output)
    assert shop.pids() <= set(pids(supervisor).values())
    supervisor.signal()
    assert supervisor.end() == 0, supervisor.output
    assert "RuntimeWarning" not in supervisor.output
    assert not any(map(is_running, pids(supervisor).values()))
    assert shop.invoke("workers", f"{MODELS}:Email").exit_code == 1


def test_a_dead_process_is_restarted(shop: Shop) -> None:
    supervisor = shop.start(*SEND, "--processes", "2")
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
    supervisor = shop.start("worker", f"{MODELS}:Letter", "--handler", f"{TASKS}:die", "--processes", "1")
    wait_until(lambda: shop.states("letter") == {"failed": 1}, lambda: supervisor.output)
    assert supervisor.output.count("was killed by SIGKILL") >= 2
    assert "restarting in 1.0 s" in supervisor.output
    supervisor.signal()
    assert supervisor.end() == 0


def test_handlers_finish_when_all_processes_receive_the_signal(shop: Shop, tmp_path: Path) -> None:
    """A service manager may send its signal to all processes of a service."""
    shop.add(Email())
    supervisor = shop.start("worker", f"{MODELS}:Email", "--handler", f"{TASKS}:send_slowly", "--processes", "1")
    wait_until((tmp_path / "at_work").exists, lambda: supervisor.output)
    for pid in (pids(supervisor)[1], supervisor.pid):
        os.kill(pid, signal.SIGTERM)
    supervisor.wait_for("SIGTERM: stopping")
    (tmp_path / "go_on").touch()
    assert supervisor.end() == 0, supervisor.output
    assert shop.states("email") == {"completed": 1}


def test_a_second_signal_kills_all_processes(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    supervisor = shop.start(
        "worker", f"{MODELS}:Email", "--handler", f"{TASKS}:send_slowly", "--grace", "1h", "--processes", "2"
    )
    wait_until((tmp_path / "at_work").exists, lambda: supervisor.output)
    supervisor.signal()
    supervisor.wait_for("SIGTERM: stopping")
    supervisor.signal(signal.SIGINT)
    assert supervisor.end() == -signal.SIGINT
    assert not any(map(is_running, pids(supervisor).values()))


def test_workers_stop_when_the_supervisor_is_killed(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    supervisor = shop.start("worker", f"{MODELS}:Email", "--handler", f"{TASKS}:send_slowly", "--processes", "1")
    wait_until((tmp_path / "at_work").exists, lambda: supervisor.output)
    supervisor.signal(signal.SIGKILL)
    (tmp_path / "go_on").touch()
    assert supervisor.end() == -signal.SIGKILL
    assert shop.states("email") == {"completed": 1}


def test_workers_stop_when_the_supervisor_is_killed_before_it_has_read_a_report(shop: Shop) -> None:
    supervisor = shop.start(*SEND, "--processes", "1")
    wait_until(lambda: consumers(shop) == 1, lambda: supervisor.output)
    supervisor.signal(signal.SIGSTOP)
    time.sleep(2 * REPORT_INTERVAL)
    supervisor.signal(signal.SIGKILL)
    assert supervisor.end() == -signal.SIGKILL


def test_all_processes_drain_a_queue(shop: Shop) -> None:
    shop.add(*(Email() for _ in range(10)))
    supervisor = shop.start(*SEND, "--processes", "2", "--drain")
    assert supervisor.end() == 0, supervisor.output
    assert shop.states("email") == {"completed": 10}


def test_a_worker_that_cannot_start_ends_the_supervisor_with_its_exit_code(shop: Shop) -> None:
    supervisor = shop.start("worker", f"{MODELS}:Email", "--handler", f"{TASKS}:sendd", "--processes", "4")
    assert supervisor.end() == 2
    assert supervisor.output.count("did you mean send?") == 1
    shop.execute("DROP TABLE email")
    supervisor = shop.start(*SEND, "--processes", "4")
    assert supervisor.end() == 3
    assert supervisor.output.count("the database lacks what Email needs: the table email") == 1


def test_consumers_of_the_application_in_several_processes(shop: Shop) -> None:
    shop.add(Email(), Letter())
    assert shop.start("worker", f"{QUEUES}:both", "--processes", "1", "--drain").end() == 0
    assert sum(shop.done().values()) == 2


def test_the_password_is_not_on_a_command_line(shop: Shop) -> None:
    url = shop.database.url().replace("postgres@", "postgres:hush-hush@")
    supervisor = shop.start(*SEND, "--processes", "1", SQLAQUEUE_URL=url)

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
