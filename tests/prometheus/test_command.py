"""``sqlaqueue metrics``: the exporter as a process, and what it prints."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request

import pytest
from click.testing import Result

from tests.cli.conftest import MODELS, QUEUES, Shop, shop
from tests.cli.shop.models import Email, Letter
from tests.programs import Program
from tests.prometheus.values import Values, parse

__all__ = ["shop"]

pytestmark = pytest.mark.once

EMAIL, LETTER = f"{MODELS}:Email", f"{MODELS}:Letter"
LONG = ("--statement-timeout", "30s")


def once(shop: Shop, *arguments: str) -> Values:
    return parse(shop.ok("metrics", *arguments, *LONG, "--once"))


def scrape(process: Program) -> Values:
    """Wait until an exporter has started, and scrape it."""
    process.wait_for("metrics: serving ")
    address = re.findall(r"serving (http://\S+)", process.output)[0]
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - the exporter's own address
        return parse(answer.read().decode())


def test_it_prints_the_metrics_of_several_queues(shop: Shop) -> None:
    shop.add(Email(), Email(), Letter())
    found = once(shop, EMAIL, LETTER)
    assert (found["jobs", "email", "pending"], found["jobs", "letter", "pending"]) == (2, 1)
    assert once(shop, f"{MODELS}:Newsletter")["jobs", "email", "pending"] == 2  # those of the whole queue
    assert once(shop, EMAIL, "--count-limit", "1")["jobs", "email", "pending"] == 1


def test_finished_jobs_are_counted_if_asked_for(shop: Shop) -> None:
    shop.add(Email(status="failed"), Email())
    assert ("jobs", "email", "failed") not in once(shop, EMAIL)
    assert once(shop, EMAIL, "--finished")["jobs", "email", "failed"] == 1


def test_the_exit_code_tells_that_something_cannot_be_read(shop: Shop) -> None:
    shop.execute("DROP TABLE email")
    result = shop.invoke("metrics", EMAIL, LETTER, "--once")
    assert result.exit_code == 1
    found = parse(result.stdout)
    assert (found["scrape_success", "email"], found["scrape_success", "letter"]) == (0, 1)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_exporter_serves_until_it_is_stopped(shop: Shop, driver: str) -> None:
    shop.add(Email(), Letter())
    url = shop.database.url(driver)  # type: ignore[arg-type] # one of the drivers
    process = shop.start("metrics", EMAIL, LETTER, "--port", "0", "--max-age", "0", *LONG, SQLAQUEUE_URL=url)
    assert scrape(process)["jobs", "letter", "pending"] == 1
    shop.add(Letter())
    assert scrape(process)["jobs", "letter", "pending"] == 2
    process.signal(signal.SIGTERM)
    assert process.end() == 0
    assert "metrics: stopped" in process.output
    assert "Traceback" not in process.output


def test_a_function_that_returns_consumers_of_both_kinds_brings_their_databases(shop: Shop) -> None:
    shop.add(Email(), Letter())
    process = shop.start("metrics", f"{QUEUES}:both", "--port", "0", *LONG, SQLAQUEUE_URL=None)
    found = scrape(process)
    assert (found["jobs", "email", "pending"], found["jobs", "letter", "pending"]) == (1, 1)
    assert found["scrape_success", "email"] == found["scrape_success", "letter"] == 1
    process.signal(signal.SIGINT)
    assert process.end() == 0
    assert "Traceback" not in process.output


def refused(result: Result, code: int, words: str) -> None:
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1 or "Usage" in result.stderr


def test_wrong_input(shop: Shop) -> None:
    refused(shop.invoke("metrics"), 2, "name a queue")
    refused(shop.invoke("metrics", EMAIL, SQLAQUEUE_URL=None), 2, "the database is missing")
    refused(shop.invoke("metrics", f"{MODELS}:NoQueue"), 2, "NoQueue is not a queue")
    refused(shop.invoke("metrics", f"{QUEUES}:make_async"), 2, "coroutine function")
    refused(shop.invoke("metrics", EMAIL, "--statement-timeout", "0", "--once"), 2, "give more than zero")
    refused(shop.invoke("metrics", EMAIL, "--port", "70000"), 2, "70000")


def test_a_database_that_does_not_answer_and_a_port_that_is_taken(shop: Shop) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    refused(shop.invoke("metrics", EMAIL, "--url", url), 3, "does not answer")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(shop.invoke("metrics", EMAIL, "--port", port), 1, f"--host 127.0.0.1 --port {port}: Address already")


def test_it_prints_the_dashboard_and_the_alerts(shop: Shop) -> None:
    assert json.loads(shop.ok("metrics", "--dashboard"))["uid"] == "sqlaqueue"
    assert shop.ok("metrics", "--alerts").startswith("# Alert rules")
