"""``sqlaqueue worker --isolate``: handlers that hang, take memory or kill their process."""

import contextlib
import os
import random
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.cli import main, supervisor
from sqlaqueue.cli.processes import LeftRun, WorkerOptions, left_line
from sqlaqueue.cli.supervised_worker import _Isolation, _Supervisor
from sqlaqueue.cli.supervisor import WorkerSlot
from tests.cli.conftest import EMAIL, MODELS, QUEUES, WORKER, Shop
from tests.cli.shop.models import Email, Letter, Row
from tests.programs import wait_until

pytestmark = pytest.mark.once


def started(output: str) -> list[int]:
    """Return the process IDs of all workers that were started, in order."""
    return [int(pid) for pid in re.findall(r"worker \d+ is process (\d+)", output)]


def ended(shop: Shop, table: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in shop.execute(f'SELECT status, attempts, last_error FROM "{table}" ORDER BY 1')]


LATE = "the handler ran for longer than {} seconds, and its process was killed"


@pytest.mark.parametrize("model", ["Email", "Letter", "Row"])
def test_a_handler_that_hangs_is_killed_and_its_attempt_counts(shop: Shop, model: str) -> None:
    """It lets no other thread of its process run. What it has written is undone, and the other job is run.

    Without a lease, the other process claims the job before a new one has started.
    """
    if model == "Row":
        shop.add(Row(year=1, number="1", max_attempts=1), Row(year=2, number="1"))
    else:
        shop.add(*(Email(), Email()) if model == "Email" else (Letter(max_attempts=1), Letter()))
    processes = ("--processes", "2") if model == "Row" else ()
    options = ("--timeout", "300ms", "--lease", "1h", *processes)
    worker = shop.start("worker", f"{MODELS}:{model}={MODELS}:hang", "--isolate", *options)
    both = {"completed": 1, "failed": 1}
    wait_until(lambda: shop.states(f'"{model.lower()}"') == both, lambda: worker.output)
    worker.signal()
    assert worker.end() == 0, worker.output
    key, kills = ("1,1" if model == "Row" else "1"), 2 if model == "Email" else 1
    said = f"queue {model.lower()}: job {key}: {LATE.format(0.3)}"
    assert len(re.findall(rf"WARNING worker \d: {re.escape(said)}", worker.output)) == kills
    error = f"JobTimeout: {LATE.format(0.3)}"
    assert ended(shop, model.lower()) == [("completed", 1, None), ("failed", kills, error)]
    assert list(shop.done().values()) == [1]


def test_a_coroutine_that_blocks_its_event_loop_is_killed_while_the_worker_stops(shop: Shop, tmp_path: Path) -> None:
    """It cannot be cancelled. Nothing is settled by then: no process takes the place of this one."""
    shop.add(Email(max_attempts=1))
    worker = shop.start("worker", f"{EMAIL}={MODELS}:hang_in_loop", "--isolate", "--timeout", "100ms", "--grace", "1h")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal()
    assert worker.end() == 0, worker.output
    assert LATE.format(2.1) in worker.output
    assert shop.states("email") == {"processing": 1}


def test_a_handler_that_takes_memory_is_killed(shop: Shop) -> None:
    shop.add(Email(max_attempts=1), Email())
    limit = ("--max-memory", "400M", "--concurrency", "4")
    worker = shop.start("worker", f"{EMAIL}={MODELS}:allocate", "--isolate", *limit, "--drain", "--lease", "1h")
    assert worker.end() == 0, worker.output
    (completed, (state, attempts, error)) = ended(shop, "email")
    assert (completed, state, attempts) == (("completed", 1, None), "failed", 1)
    text = r"WorkerDied: its process had \d+M of memory, more than --max-memory 400M, and was killed"
    assert re.fullmatch(text, str(error)), error
    assert worker.output.count("so concurrency=4 of its Consumer has no effect") == 1


def test_a_process_is_replaced_after_a_number_of_jobs(shop: Shop, tmp_path: Path) -> None:
    """By one that has started before, and that waits for the end of the other."""
    shop.add(Email(), Email())
    worker = shop.start("worker", f"{EMAIL}={MODELS}:send_slowly", "--isolate", "--max-jobs", "1", "--drain", "-v")
    worker.wait_for("waits for the end of process ")
    # If it did not wait, it would start now.
    time.sleep(0.3)
    (tmp_path / "go_on").touch()
    assert worker.end() == 0, worker.output
    next_starts = f"[{started(worker.output)[1]}] INFO queue email: started"
    assert worker.output.index("worker 1 is replaced") < worker.output.index(next_starts)
    assert shop.done() == {("email", "1"): 1, ("email", "2"): 1}
    assert sorted(shop.pids()) == sorted(started(worker.output)[:2])
    assert worker.output.count("worker 1 is replaced after 1 jobs") == 2


def test_a_process_that_dies_gives_its_job_back_at_once(shop: Shop) -> None:
    """The lease has not expired, and the text says what is known. The next one has too much memory after its job."""
    shop.add(Email(max_attempts=1), Email())
    limits = ("--max-memory", "2G", "--lease", "1h")
    worker = shop.start("worker", f"{EMAIL}={MODELS}:die_or_grow", "--isolate", "--drain", *limits)
    assert worker.end() == 0, worker.output
    error = (
        "its process was killed by SIGKILL while it ran this job alone; the system does that when it is out of memory"
    )
    assert ended(shop, "email") == [("completed", 1, None), ("failed", 1, f"WorkerDied: {error}")]
    assert "worker 1 is replaced as it has 4096M of memory after a job" in worker.output
    assert len(started(worker.output)) == 3


def test_a_handler_that_ends_its_process_has_failed(shop: Shop) -> None:
    """Even with exit code 0, with which a process ends that finds no due job. Tracebacks start at the handler."""
    shop.add(Email(max_attempts=1), Email(max_attempts=1))
    worker = shop.start("worker", f"{EMAIL}={MODELS}:exit_or_raise", "--isolate", "--drain")
    assert worker.end() == 0, worker.output
    error = "WorkerDied: its process ended with exit code 0 while it ran this job alone"
    (_, _, first), (_, _, second) = ended(shop, "email")
    assert {str(first).partition("\n")[0], str(second).partition("\n")[0]} == {error, "ValueError: wrong"}
    (stack,) = (text for text in (str(first), str(second)) if "Traceback" in text)
    assert re.findall(r'File ".*?(\w+)\.py", line \d+, in (\w+)', stack) == [("models", "exit_or_raise")]
    assert "supervised_worker.py" not in worker.output


@pytest.mark.thorough
def test_a_forked_child_that_returns_from_the_handler_ends(shop: Shop) -> None:
    """It has not the thread that watches the time, and the call of its parent goes on."""
    shop.add(Email(max_attempts=1))
    worker = shop.start("worker", f"{EMAIL}={MODELS}:fork_and_return", "--isolate", "--timeout", "20s", "--drain")
    assert worker.end() == 0, worker.output
    assert ended(shop, "email") == [("completed", 1, None)]


@pytest.mark.thorough
def test_a_handler_that_hangs_ends_though_its_supervisor_is_dead(shop: Shop, tmp_path: Path) -> None:
    """No thread of its process can run, and its lease is not extended for ever. The log says where it was."""
    shop.add(Email())
    worker = shop.start("worker", f"{EMAIL}={MODELS}:hang", "--isolate", "--timeout", "300ms")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal(signal.SIGKILL)
    assert worker.end() == -signal.SIGKILL
    assert re.search(r"Timeout \(0:00:05\.3\d*\)!", worker.output), worker.output
    assert " in hang" in worker.output


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["Email", "Letter"])
def test_processes_that_are_killed_at_random_lose_no_job_and_run_none_twice(shop: Shop, model: str) -> None:
    kind, number = {"Email": Email, "Letter": Letter}[model], 60
    shop.add(*(kind(max_attempts=1000) for _ in range(number)))
    limits = ("--processes", "2", "--max-jobs", "8", "--max-memory", "2G", "--timeout", "30s", "--lease", "3s")
    worker = shop.start("worker", f"{MODELS}:{model}={MODELS}:send_at_risk", "--isolate", *limits)
    dice = random.Random(7)
    for done in range(10, number, 10):
        wait_until(lambda done=done: len(shop.done()) >= done, lambda: worker.output)
        # It may have been replaced a moment ago.
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(started(worker.output)[-2:]), signal.SIGKILL)
    wait_until(lambda: shop.states(model.lower()) == {"completed": number}, lambda: worker.output)
    worker.signal()
    assert worker.end() == 0, worker.output
    assert set(shop.done().values()) == {1}
    assert worker.output.count("was killed by SIGKILL") >= 3
    assert "is replaced after 8 jobs" in worker.output


def killed(key: str) -> LeftRun:
    return LeftRun(
        run={"key": key, "worker": "elsewhere:7", "attempt": 1}, seconds=1.0, kind="JobTimeout", error="it hung"
    )


def test_a_process_that_starts_is_told_of_a_death() -> None:
    """Without a lease, the job is free then, and this may be the first process to claim it."""
    ours, theirs = socket.socketpair()
    connection = _Supervisor(theirs)
    isolation = _Isolation(WorkerOptions(targets=["app:Email"], isolate=True), connection)
    with ours:
        ours.sendall(left_line([]) + left_line([killed("1")]))
    with theirs:
        # The application is being imported, and there is no Consumer yet.
        connection.wait_until_closed()
    consumer = Consumer(Email, lambda session, job: None, sessionmaker())
    isolation._prepare([consumer])
    death = consumer._parts.deaths.take("1")
    assert death is not None
    assert (str(death.error), death.worker) == ("it hung", "elsewhere:7")


def test_a_process_that_is_restarted_is_told_of_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not run at the time of the death."""
    sent = list[list[LeftRun]]()

    class Process:
        leaves = None

        def __init__(self, *_: object) -> None:
            pass

        def left_run(self, code: int) -> None:
            pass

        def send_left(self, left: list[LeftRun]) -> None:
            sent.append([*left])

    monkeypatch.setattr(supervisor, "_Process", Process)
    slot = WorkerSlot(1, WorkerOptions(targets=["app:Email"], isolate=True))
    slot.tell(killed("1"))
    slot.start_if_due()
    assert sent == [[], [killed("1")]]
    slot.tell(killed("2"))
    assert sent[2:] == [[killed("2")]]
    slot.take_ended(0)
    slot.start_if_due()
    assert sent[3:] == [[]]


def test_a_process_that_cannot_take_the_place_of_another_is_not_started_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that leaves may have hours of its last job before it."""
    made = list[object]()

    class Process:
        leaves, is_started, error = "after 2 jobs", False, None

        def __init__(self, *_: object) -> None:
            made.append(self)

        def send_left(self, left: list[LeftRun]) -> None:
            pass

        def poll(self) -> int | None:
            return None if self is made[0] else 3

    monkeypatch.setattr(supervisor, "_Process", Process)
    slot = WorkerSlot(1, WorkerOptions(targets=["app:Email"], isolate=True))
    for _ in range(5):
        slot.start_if_due()
        assert slot.poll() is None
    assert len(made) == 2


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*WORKER, "--url", "postgresql://localhost:1/nowhere", *arguments])
    assert result.exit_code == 2, result.output
    return result.stderr.splitlines()[-1]


def test_wrong_options_are_refused() -> None:
    unit = "is no amount of memory; write a number with a unit, as 512M or 2G"
    for wrong in ("lots", "512", "0M", "-1M", "1T"):
        assert refused("--isolate", f"--max-memory={wrong}").endswith(f"'{wrong}' {unit}")
    for option in ("--max-memory=1g", "--max-jobs=3"):
        name = option.partition("=")[0]
        assert refused(option) == f"Error: {name}: it limits the processes of --isolate; add --isolate, or leave it out"
    assert "0 is not in the range x>=1" in refused("--isolate", "--max-jobs=0")


def test_max_memory_needs_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlaqueue.cli.worker.resident_bytes", lambda _: 0)
    expected = "Error: --max-memory: this system has no /proc, which shows the memory of a process; leave it out"
    assert refused("--isolate", "--max-memory=1g") == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((f"{EMAIL}={MODELS}:send", "--timeout=0"), "a handler cannot end in zero seconds; give None for no limit"),
        ((f"{EMAIL}={MODELS}:send", "--max-memory=1M"), " before its first job; give more"),
        (
            (f"{QUEUES}:both",),
            "--isolate: 2 Consumers (email, letter), but a process runs one handler at a time; start ",
        ),
    ],
    ids=["timeout", "memory", "consumers"],
)
def test_what_a_process_refuses_ends_the_worker(shop: Shop, arguments: tuple[str, ...], error: str) -> None:
    url = None if arguments[0] == f"{QUEUES}:both" else shop.database.url()
    worker = shop.start("worker", *arguments, "--isolate", SQLAQUEUE_URL=url)
    assert worker.end() == 2
    assert f"{error}" in worker.output
    assert worker.output.count("Error: ") == 1
