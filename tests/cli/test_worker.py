"""``sqlaqueue worker`` in a process of its own, with the signals of a service manager."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from sqlaqueue.cli.output import NOT_STOPPED
from tests.cli.conftest import MODELS, QUEUES, TASKS, Shop
from tests.cli.shop.models import Email, Letter, Row, Task
from tests.programs import wait_until

pytestmark = pytest.mark.once

EMAILS = ("worker", f"{MODELS}:Email")


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
    output = drained(shop, f"{MODELS}:{model}", "--handler", f"{TASKS}:{handler}", "--concurrency", "2")
    kind = "tasks" if handler == "send_async" else "threads"
    assert f"serves database {shop.database.name} at" in output
    assert f"with 2 worker {kind}, until no job is due" in output
    assert "finished runs: 2" in output
    assert sorted(shop.done().values()) == [1, 1]


def test_each_class_has_a_handler_of_its_own(shop: Shop) -> None:
    """In any order; a handler from the settings is for classes without one."""
    shop.add(Email(), Letter(), Row(year=1, number="1"))
    bound = (f"{MODELS}:Email={TASKS}:send", f"{MODELS}:Row", f"{MODELS}:Letter={TASKS}:send_async")
    drained(shop, *bound, "--handler", f"{TASKS}:send_async")
    assert sorted(queue for queue, _ in shop.done()) == ["email", "letter", "row"]
    shop.add(Email())
    drained(shop, f"{MODELS}:Email={TASKS}:send", SQLAQUEUE_WORKER_HANDLER=f"{TASKS}:fall_ill")
    assert shop.states("email") == {"completed": 2}


def test_garbage_collector_and_thread_switching_are_tuned(shop: Shop) -> None:
    """The garbage collector runs less often, and threads are switched more often."""
    shop.add(Email())
    output = drained(shop, *EMAILS[1:], "--handler", f"{TASKS}:log_interpreter_settings")
    assert "young: 50000 frozen: True switch: 0.001" in output


def test_several_queues_in_one_process(shop: Shop) -> None:
    shop.add(Email(), Email(), Letter(), Row(year=1, number="a"), Task())
    worker = shop.start(
        *EMAILS,
        f"{QUEUES}:async_consumer",
        f"{MODELS}:Row",
        f"{QUEUES}:make",
        *("--handler", f"{TASKS}:send", "--handler", f"{TASKS}:send_async"),
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


@pytest.mark.parametrize("target", ["Email", "Letter"])
def test_a_paused_queue_is_drained(shop: Shop, target: str) -> None:
    """With a Consumer and with an AsyncConsumer."""
    shop.add(Email(), Letter())
    shop.ok("pause", f"{MODELS}:{target}")
    output = drained(shop, f"{QUEUES}:both", SQLAQUEUE_URL=None)
    assert f"WARNING queue {target.lower()} is paused, so none of its jobs is claimed" in output
    assert output.count("is paused") == 1
    assert "finished runs: 1" in output


def test_jobs_enqueued_by_a_handler_are_drained_as_well(shop: Shop) -> None:
    shop.add(Email())
    handlers = ("--handler", f"{TASKS}:send", "--handler", f"{TASKS}:send_on")
    assert "finished runs: 2" in drained(shop, f"{MODELS}:Letter", f"{MODELS}:Email", *handlers)
    assert shop.done() == {("email", "1"): 1, ("letter", "1"): 1}


def test_a_consumer_that_cannot_start_stops_the_others(shop: Shop) -> None:
    worker = shop.start("worker", f"{QUEUES}:too_few_connections")
    assert worker.end() == 2
    assert "Error: Consumer(concurrency=3) needs 4 connections" in worker.output
    assert "Traceback" not in worker.output


def test_a_batch_handler(shop: Shop) -> None:
    shop.add(*(Email() for _ in range(5)))
    drained(shop, f"{MODELS}:Email", "--handler", f"{TASKS}:send_all", "--batch", "--batch-size", "3")
    assert sorted(shop.done()) == [("batch", "2"), ("batch", "3")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_handler_finishes_after_a_signal(shop: Shop, tmp_path: Path, number: signal.Signals) -> None:
    shop.add(Email(), Email())
    worker = shop.start(*EMAILS, "--handler", f"{TASKS}:send_slowly")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal(number)
    worker.wait_for(f"queue email: {number.name}: stopping, 1 running job to finish within 30 s, ")
    worker.wait_for("; a second signal aborts")
    (tmp_path / "go_on").touch()
    assert worker.end() == 0, worker.output
    assert shop.states("email") == {"completed": 1, "pending": 1}


@pytest.mark.each_value
@pytest.mark.parametrize("processes", [(), ("--processes", "1")])
@pytest.mark.parametrize("handler", ["send_slowly", "send_stubbornly"])
def test_jobs_are_released_after_the_grace_period(
    shop: Shop, tmp_path: Path, handler: str, processes: tuple[str, ...]
) -> None:
    """The process ends with an exit code that says so, although a thread or a task of it goes on."""
    shop.add(Email())
    worker = shop.start(*EMAILS, "--handler", f"{TASKS}:{handler}", "--grace", "100ms", *processes)
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal()
    assert worker.end() == NOT_STOPPED, worker.output
    assert f"stopped, but {TASKS}.{handler} (job 1, for" in worker.output
    assert shop.states("email") == {"pending": 1}
    assert shop.done() == {}


def test_a_handler_that_goes_on_does_not_keep_a_worker_that_fails(shop: Shop) -> None:
    """Another Consumer has failed before; waiting for the handler's event loop to close would never end."""
    shop.add(Letter())
    worker = shop.start("worker", f"{QUEUES}:make_failing")
    assert worker.end() == NOT_STOPPED, worker.output
    assert "no session" in worker.output


def test_a_second_signal_ends_the_worker_immediately(shop: Shop, tmp_path: Path) -> None:
    shop.add(Email())
    worker = shop.start(*EMAILS, "--handler", f"{TASKS}:send_slowly", "--grace", "1h")
    wait_until((tmp_path / "at_work").exists, lambda: worker.output)
    worker.signal(signal.SIGINT)
    worker.wait_for("SIGINT: stopping")
    worker.signal(signal.SIGTERM)
    assert worker.end() == -signal.SIGTERM


def test_the_log_contains_no_password(shop: Shop) -> None:
    url = shop.database.url().replace("postgres@", "postgres:hush-hush@")
    output = drained(shop, f"{MODELS}:Email", "--handler", f"{TASKS}:send", "--log-level", "debug", SQLAQUEUE_URL=url)
    assert f"serves database {shop.database.name}" in output
    assert "hush-hush" not in output


def test_verbose_logs_every_job(shop: Shop) -> None:
    shop.add(Email())
    assert "job 1 of queue email: completed in" in drained(shop, f"{MODELS}:Email", "--handler", f"{TASKS}:send", "-v")
    shop.add(Email())
    assert "completed" not in drained(shop, f"{MODELS}:Email", "--handler", f"{TASKS}:send")
