"""``sqlaqueue web``: the dashboard as a process of its own."""

import contextlib
import http.client
import json
import re
import signal
import socket
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from typing import Any
from urllib.parse import urljoin

import pytest
from click.testing import Result

from sqlaqueue.cli.worker import MOST_CONNECTIONS
from tests.cli.conftest import EMAIL, LETTER, MODELS, QUEUES, Shop
from tests.cli.shop.models import Email, Letter
from tests.programs import Program, wait_until

pytestmark = pytest.mark.once

LINK = re.compile(r"Open (http://127\.0\.0\.1:\d+/\S{22}/\?token=\S+)")


class Browser:
    """A client with cookies."""

    def __init__(self) -> None:
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def get(self, url: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(url, data, headers)  # noqa: S310 - the command's own address
        try:
            with self._opener.open(request, timeout=60) as answer:
                status, page = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        goes_on = re.search(r'<meta http-equiv="refresh" content="0; url=([^"]+)">', page)
        return (status, page) if goes_on is None else self.get(urljoin(url, goes_on[1]))

    def post(self, url: str, **headers: str) -> int:
        return self.get(url, b"", **headers)[0]


def links(process: Program, number: int = 1) -> list[str]:
    """Wait until a process has printed so many links, and return them."""
    wait_until(lambda: len(LINK.findall(process.output)) >= number, lambda: process.output)
    return LINK.findall(process.output)


def ended(process: Program, number: signal.Signals = signal.SIGTERM) -> None:
    process.signal(number)
    assert process.end() == 0, process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_module_is_served_to_the_browser_that_has_the_link(shop: Shop, driver: Any) -> None:
    shop.add(Email(), Letter())
    process = shop.start("web", MODELS, "--port", "0", SQLAQUEUE_URL=shop.database.url(driver))
    (link,) = links(process)
    root = link.partition("?")[0]
    browser = Browser()
    assert browser.get(root)[0] == 401
    status, page = browser.get(link)
    assert status == 200
    for queue in ("email", "letter", "row", "task", "bare"):
        assert queue in page
    assert "newsletter" not in page
    # Other addresses of this port, which have no secret path, show nothing.
    assert browser.get("/".join([*root.split("/")[:3], ""]))[0] == 401
    # For another browser, another link.
    assert Browser().get(link)[0] == 401
    other = links(process, 2)[1]
    assert other != link
    assert Browser().get(other)[0] == 200
    assert browser.get(root, Host="evil.example")[0] == 421
    assert browser.post(f"{root}queues/email/actions/pause", Origin="https://evil.example") == 403
    ended(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_while_a_window_is_open(shop: Shop, number: signal.Signals) -> None:
    process = shop.start("web", EMAIL, "--port", "0")
    (link,) = links(process)
    host = link.split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=60)
    path = f"/{link.split('/')[3]}/"
    connection.request("GET", f"{path}?token=" + link.partition("=")[2])
    answer = connection.getresponse()
    answer.read()
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    connection.request("GET", f"{path}events", headers={"Cookie": cookie})
    stream = connection.getresponse()
    assert stream.readline() == b": connected\n"
    ended(process, number)
    while stream.readline():
        pass
    connection.close()


def test_connections_that_say_nothing_are_no_obstacle(shop: Shop) -> None:
    process = shop.start("web", EMAIL, "--port", "0")
    (link,) = links(process)
    host, port = link.split("/")[2].split(":")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MOST_CONNECTIONS)]
        browser = Browser()
        assert browser.get(link)[0] == 200
        # Those that were the first have been ended.
        silent[0].settimeout(60)
        assert silent[0].recv(1) == b""
        silent[-1].settimeout(0)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
    ended(process)


def test_what_a_consumer_brings(shop: Shop) -> None:
    process = shop.start("web", f"{QUEUES}:consumer", "--port", "0", SQLAQUEUE_URL=None)
    assert "email" in Browser().get(links(process)[0])[1]
    ended(process)
    process = shop.start("web", f"{QUEUES}:async_consumer", "--port", "0", SQLAQUEUE_URL=None)
    assert "letter" in Browser().get(links(process)[0])[1]
    ended(process)


def test_nothing_can_be_changed_if_it_is_read_only(shop: Shop) -> None:
    process = shop.start("web", EMAIL, "--port", "0", "--read-only")
    (link,) = links(process)
    browser = Browser()
    assert browser.get(link)[0] == 200
    assert (
        browser.post(link.partition("?")[0] + "queues/email/actions/pause", **{"Sec-Fetch-Site": "same-origin"}) == 403
    )
    ended(process)


def test_an_access_rule_of_the_application(shop: Shop) -> None:
    (shop.directory / "rules.py").write_text(
        "from sqlaqueue.web import Access\n"
        "def rule(request):\n"
        "    return Access(read=['email']) if request.headers.get('x-user') == 'ada' else None\n"
    )
    process = shop.start("web", EMAIL, LETTER, "--port", "0", "--host", "0.0.0.0", "--access", "rules:rule")  # noqa: S104 - what is tested
    process.wait_for("The dashboard is at ")
    port = re.findall(r"is at http://0\.0\.0\.0:(\d+)/", process.output)[0]
    root = f"http://127.0.0.1:{port}/"
    assert Browser().get(root)[0] == 403
    status, page = Browser().get(root, **{"X-User": "ada"})
    assert (status, "email" in page, "letter" in page) == (200, True, False)
    assert Browser().get(root, Host="ops.example")[0] == 421
    ended(process)


def refused(result: Result, code: int, words: str) -> None:
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1 or "Usage" in result.stderr


def test_wrong_input(shop: Shop) -> None:
    refused(shop.invoke("web"), 2, "Missing argument")
    refused(shop.invoke("web", "tests.cli.shop"), 2, "the module has no queue class and no Consumer")
    refused(shop.invoke("web", "tests.cli.nothing"), 2, "there is no module")
    refused(shop.invoke("web", "tests/cli/shop/models.py"), 2, "write a module as app.models")
    refused(shop.invoke("web", f"{MODELS}:NoQueue"), 2, "NoQueue is not a queue")
    refused(shop.invoke("web", EMAIL, SQLAQUEUE_URL=None), 2, "the database is missing")
    refused(shop.invoke("web", f"{QUEUES}:both", SQLAQUEUE_URL=None), 2, "several session factories")
    refused(shop.invoke("web", EMAIL, "--host", "0.0.0.0"), 2, "Mount sqlaqueue.web.Dashboard")  # noqa: S104 - what is tested
    refused(shop.invoke("web", EMAIL, "--host", "ops.example"), 2, "only this machine has access")
    refused(shop.invoke("web", EMAIL, "--access", f"{MODELS}:Email.id"), 2, "name a function")
    refused(shop.invoke("web", EMAIL, "--access", f"{MODELS}:nothing"), 2, "no attribute nothing")
    refused(shop.invoke("web", EMAIL, "--access", "json:loads", "--read-only"), 2, "give one of the two")
    refused(shop.invoke("web", EMAIL, "--redact", "nothing"), 2, "nothing")
    refused(shop.invoke("web", EMAIL, "--origin", "nowhere"), 2, "nowhere")
    refused(shop.invoke("web", EMAIL, "--port", "70000"), 2, "70000")


def test_a_database_that_does_not_answer_and_a_port_that_is_taken(shop: Shop) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    refused(shop.invoke("web", EMAIL, "--url", url), 3, "does not answer")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(shop.invoke("web", EMAIL, "--port", port), 1, f"--host 127.0.0.1 --port {port}: Address already")


def test_what_it_needs_is_named_if_it_is_not_installed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    refused(shop.invoke("web", EMAIL), 2, "pip install 'sqlaqueue[web]'")


def test_the_log_has_no_token(shop: Shop) -> None:
    process = shop.start("web", EMAIL, "--port", "0", "--log-level", "debug")
    (link,) = links(process)
    Browser().get(link)
    ended(process)
    token = link.partition("=")[2]
    assert process.output.count(token) == 1
    assert json.dumps(token) not in process.output
