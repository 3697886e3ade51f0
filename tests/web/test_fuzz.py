"""Random requests, with values that no form sends: none leads to an error of the server, whoever asks."""

import logging
import random
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from starlette.requests import Request

from sqlaqueue import Schedule
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.context import PATHS
from sqlaqueue.web.dashboard import GET, POST
from tests.fuzz.mutations import Mutator
from tests.shared_database import each_engine, shared
from tests.web.conftest import client
from tests.web.engines import FULL, make_queues

__all__ = ["each_engine", "shared"]

REQUESTS = 1500
SEED = 1

TEXTS = [
    "",
    " ",
    "a",
    "%",
    "%%s",
    "'",
    '"',
    "\\",
    "<script>",
    "../..",
    "//evil",
    "a\r\nb: c",
    "\t",
    "\x1b[2J",
    "\u202e",
]
TEXTS += ["\0", "\U0010ffff", "İ", "{{7*7}}", "=1+1", "a" * 1001, "a" * 8001, "{", "[" * 5000, '"\\ud800"', '"\\u0000"']
NUMBERS = [
    "0",
    "1",
    "-1",
    "00",
    "1,2",
    "9" * 19,
    "9" * 400,
    "9" * 5000,
    "1e999",
    "1e999999999",
    "1e9999999999999999999",
    "NaN",
    "-inf",
    "1.5",
]
TIMES = [
    "2030-01-01T00:00Z",
    "2030-01-01",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
    "10000-01-01",
    "1h",
]
TIMES += [
    "infinity",
    "0044-03-15 BC",
    "2024-02-30",
    "99999d",
    "now",
    "UTC",
    "Europe/Berlin",
    "../../etc/passwd",
    "1min",
]
WORDS = ["pending", "due", "failed", "expired", "other", "yes", "no", "null", "true", "ValueError", "requeue", "cancel"]
WORDS += ["change", "purge", "save", "look", "email", "nightly", "* * * * *", "0 0 30 2 *", '{"recipient": "a"}', "{}"]

NAMES = ["state", "error", "message", "job", "sort", "columns", "after", "before", "list", "at", "key", "all", "until"]
NAMES += ["from", "most", "action", "q", "add", "value", "time", "within", "since", "then", "version", "spread", "id"]
NAMES += ["reason", "queue", "schedule", "zone", "back", "span", "deep", "notice", "size", "cron", "every", "timezone"]
NAMES += ["values", "jitter", "catch_up", "misfire_grace", "skip_unfinished", "origin"]

EDITED = ["subject", "kind", "payload", "total", "weight", "urgent", "day", "at", "reference", "priority", "run_at"]

ACTIONS = ["requeue", "cancel", "purge", "change", "edit", "enqueue", "rescue", "pause", "resume", "undo", "nothing"]

USERS = {
    "ada": Access(read=True, act=True, user="ada"),
    "bob": Access(read=["email"], act={"email": ["requeue", "edit"]}, user="bob"),
    "eve": Access(read=True, user="eve"),
}


class Asker:
    """Makes requests, and learns from the answers: cursors, numbers of actions, and versions of jobs."""

    def __init__(self, columns: Sequence[str], queues: Sequence[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._mutator = Mutator(self._random, [*TEXTS, *NUMBERS, *TIMES, *WORDS])
        self._columns, self._queues = columns, queues
        self._learned: dict[str, list[str]] = {"cursor": ["WyJpZCBpZD4iLCIxIl0"], "id": ["1"], "version": ["1"]}

    def learn(self, text: str) -> None:
        for name, pattern in [
            ("cursor", r"(?:after|at)=([\w-]{8,300})"),
            ("id", r"(?:undoable|done)%3A(\d+)"),
            ("version", r'name="version" value="([^"]+)"'),
        ]:
            self._learned[name] = [*self._learned[name], *re.findall(pattern, text)[:2]][-100:]

    def value(self) -> str:
        choose = self._random.choice
        match self._random.randrange(9):
            case 0:
                return choose(self._learned[choose(["cursor", "id", "version"])])
            case 1:
                cursor = choose(self._learned["cursor"])
                place = self._random.randrange(len(cursor))
                return f"{cursor[:place]}{choose('Az09-_')}{cursor[place + 1 :]}"
            case 2:
                return choose(self._columns) + choose(["", ":", ":>=", ":~", ".a:", ":5.."]) + choose([*TEXTS, *TIMES])
            case 3:
                return self._mutator.input()
            case _:
                return choose(choose([TEXTS, NUMBERS, TIMES, WORDS]))

    def _column(self) -> str:
        end = self._random.choice(["", ".min", ".max", ".null", ".last", ".contains", ".json.a.0", ".json."])
        return f"f.{self._random.choice(self._columns)}{end}"

    def fields(self, page: str) -> list[tuple[str, str]]:
        """Return fields that the page has, most with values that it may take, and sometimes others."""
        choose, some, learned = self._random.choice, self.value, self._learned
        which = choose([("key", choose(["1", "2", "3", some()])), ("all", "1")])
        given = {
            "jobs": [(choose([self._column(), "sort", "columns", "after", "q", "job", "message"]), some())],
            "job": [("key", choose(["1", some()])), choose([("at", choose(learned["cursor"])), ("x", "")])],
            "confirm": [("action", choose(ACTIONS)), which, (choose(["until", "from", "list", "state"]), some())],
            "search": [("q", some())],
            "act": [
                *[which, ("until", choose(["2031-01-01T00:00:00+00:00", some()])), ("state", choose(WORDS))],
                *[("version", choose(learned["version"])), ("id", choose(learned["id"])), ("then", choose(WORDS))],
                *[(f"v.{name}", choose(choose([NUMBERS, TIMES, TEXTS]))) for name in self._random.sample(EDITED, 3)],
                (choose(["spread", "reason", "from", "most"]), some()),
            ],
            "act_on_schedule": [
                *[("queue", "email"), ("schedule", choose(["nightly", some()])), ("then", choose(["look", "save"]))],
                *[("every", choose(["60", some()])), ("values", choose(['{"recipient": "a"}', some()]))],
                *[("timezone", choose(["UTC", some()])), (choose(["jitter", "catch_up", "cron"]), some())],
            ],
        }
        alike = {"export": "jobs", "api_jobs": "jobs", "api_job": "job", "edit": "job", "enqueue": "job"}
        found = [each for each in given.get(alike.get(page, page), []) if self._random.random() < 0.9]
        others = self._random.choice([0] * 9 + [1, 1, 2, 3, 20])
        return [*found, *((choose([self._column(), *NAMES]), some()) for _ in range(others))]

    def request(self) -> dict[str, Any]:
        choose = self._random.choice
        is_post = self._random.random() < 0.4
        pages = [*POST, *["act"] * 6] if is_post else [page for page in GET if page != "events"]
        page = choose(pages)
        action = choose(["save", "run", "remove", "stop"] if page in {"act_on_schedule", "act_on_worker"} else ACTIONS)
        queue = choose(self._queues) if self._random.random() < 0.95 else self.value()[:100]
        parts = {"queue": queue, "action": action, "form": choose(["csv", "json"])}
        path = "/" + PATHS[page].format(**{name: quote(part, safe="") for name, part in parts.items()})
        fields = urlencode(self.fields(page))
        headers = {"X-User": choose(["ada", "ada", "ada", "bob", "eve"])}
        if is_post:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            return {"method": "POST", "url": path, "content": fields, "headers": headers}
        return {"method": choose(["GET", "GET", "HEAD"]), "url": f"{path}?{fields[:50_000]}", "headers": headers}


@pytest.mark.thorough
async def test_no_request_leads_to_an_error_of_the_server(
    each_engine: sa.Engine, no_examination: None, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    models = make_queues()
    email, metadata = models[0], models[0].metadata
    groups = schedule_groups([Schedule("nightly", email, every=60, values={"recipient": "a"})], "test")
    metadata.create_all(each_engine)
    states = ("pending", "failed", "completed")
    with Session(each_engine) as session:
        session.add_all(email(id=n, recipient=f"a{n}", status=states[n % 3], **FULL) for n in range(1, 60))
        for group in groups:
            declare(session, group)
        session.commit()

    def access(request: Request) -> Access:
        return USERS[request.headers["x-user"]]

    dashboard = Dashboard(models, sessionmaker(each_engine), access=access, redact=["Email.secret"])
    columns = [column.key for column in sa.inspect(email).columns]
    seed = pytestconfig.getoption("--seed")
    asker = Asker(columns, ["email", "email", "letter", "page", "book"], SEED if seed is None else seed)
    caplog.set_level(logging.WARNING)
    async with client(dashboard) as browser:
        for _ in range(pytestconfig.getoption("--inputs") or REQUESTS):
            asked = asker.request()
            answer = await browser.request(**asked)
            assert answer.status_code < 500, (asked, caplog.text)
            assert caplog.records == [], asked
            asker.learn(answer.text + answer.headers.get("location", ""))
