"""Origins of POSTs, forms and the audit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.requests import Request

from sqlaqueue.web.errors import BadRequest, Forbidden, TooLarge
from sqlaqueue.web.security import MOST_BYTES, check_origin, read_form, write_audit

OWN = "http://localhost:8000"
PUBLIC = "https://ops.example.com"


def headers(**given: str) -> dict[str, str]:
    return {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in given.items()}}


@pytest.mark.parametrize(
    "given",
    [
        {"origin": OWN},
        {"origin": OWN, "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "same-origin"},
        # A proxy has changed the host, the browser has not.
        {"origin": "https://ops.example.com", "sec_fetch_site": "same-origin"},
        {"origin": "https://other.example", "sec_fetch_site": "same-origin", "host": "app:8000"},
    ],
)
def test_posts_of_own_pages_are_served(given: dict[str, str]) -> None:
    check_origin(headers(**given), "http", {PUBLIC})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"origin": "null"},
        {"origin": "null", "sec_fetch_site": "same-origin"},
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:8001"},
        {"origin": "https://localhost:8000"},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "http://localhost"},
        {"origin": "http://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": OWN, "sec_fetch_site": "cross-site"},
        {"origin": OWN, "sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "https://sub.ops.example.com", "sec_fetch_site": "same-site"},
    ],
)
def test_posts_from_elsewhere_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        check_origin(headers(**given), "http", {PUBLIC})


def request(body: bytes, content_type: str = "application/x-www-form-urlencoded") -> Request:
    chunks = [body[start : start + 65536] for start in range(0, len(body), 65536)] or [b""]

    async def receive() -> Any:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", content_type.encode())]}
    return Request(scope, receive)


async def test_fields_keep_order_unicode_and_empty_values() -> None:
    form = await read_form(request(b"key=1&key=%C3%BC%0A&empty=&key=9223372036854775807"))
    assert form.all("key") == ["1", "ü\n", "9223372036854775807"]
    assert (form.get("empty", "x"), form.get("missing", "x")) == ("", "x")


@pytest.mark.parametrize("body", [b"a=%ff", b"a=\xff", b"a=%00", b"&".join(b"a=1" for _ in range(3000))])
async def test_forms_that_cannot_be_stored_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        await read_form(request(body))


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x", "text/plain", ""])
async def test_other_types_are_refused(content_type: str) -> None:
    with pytest.raises(BadRequest):
        await read_form(request(b"a=1", content_type))


async def test_large_forms_are_not_read_to_the_end() -> None:
    sent = 0

    async def receive() -> Any:
        nonlocal sent
        sent += 1_000_000
        return {"type": "http.request", "body": b"a" * 1_000_000, "more_body": True}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"content-type", b"application/x-www-form-urlencoded")],
    }
    with pytest.raises(TooLarge):
        await read_form(Request(scope, receive))
    assert sent <= MOST_BYTES + 1_000_000


def test_audit_names_who_what_and_how_many(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sqlaqueue.audit"):
        write_audit("ada", "cancel", "email", count=3, keys=["1", "2", "3"])
    record: Any = caplog.records[0]
    assert (record.user, record.action, record.queue, record.count) == ("ada", "cancel", "email", 3)
    assert record.facts == {"keys": ["1", "2", "3"]}
    assert record.getMessage() == "user='ada' action=cancel queue='email' count=3 keys=['1', '2', '3']"


def test_audit_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sqlaqueue.audit"):
        write_audit("ada\nuser='eve' action=purge", "cancel", "em\rail", count=1, keys=["1\n2"])
    assert "\n" not in caplog.records[0].getMessage()
    assert "\r" not in caplog.records[0].getMessage()


def test_audit_of_many_keys_is_short(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sqlaqueue.audit"):
        write_audit("ada", "cancel", "email", count=5000, keys=[str(number) for number in range(5000)])
    record: Any = caplog.records[0]
    assert record.facts["keys"][-1] == "and 4900 more"
