"""The forms that browsers send: parsed within limits, so that a large one costs no memory."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

import anyio
from starlette.requests import ClientDisconnect, Request

from sqlaqueue.web.errors import BadRequest, TooLarge, TooSlow

MOST_BYTES = 2_000_000
"""The largest form. An argument of this size can be edited elsewhere."""

MOST_FIELDS = 2000

LONGEST_WAIT = 30.0
"""Seconds within which a form has to arrive. One of which a byte arrives now and then would be waited for for ever."""

_FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True)
class FormData:
    """The fields of a form, in their order; a name may occur several times."""

    fields: tuple[tuple[str, str], ...]

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a field."""
        return next((value for field, value in self.fields if field == name), default)

    def all(self, name: str) -> list[str]:
        """Return all values of a field."""
        return [value for field, value in self.fields if field == name]


async def read_form(request: Request) -> FormData:
    """Return the form of a POST.

    :raises TooLarge: if it is larger than :data:`MOST_BYTES`.
    :raises TooSlow: if it has not arrived within :data:`LONGEST_WAIT`.
    :raises BadRequest: if it is no form, is broken off, is not UTF-8, or contains a NUL character, which PostgreSQL
        cannot store.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise BadRequest(f"A POST must be a form of the type {_FORM}.")
    try:
        with anyio.fail_after(LONGEST_WAIT):
            body = await _body(request)
    except TimeoutError:
        raise TooSlow(f"The form has not arrived within {LONGEST_WAIT:.0f} seconds.", "Send it again.") from None
    try:
        text = body.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError:
        raise BadRequest("The form cannot be read: it is not UTF-8, or has too many fields.") from None
    if any("\0" in name or "\0" in value for name, value in pairs):
        raise BadRequest("The form contains a NUL character, which PostgreSQL cannot store.")
    return FormData(tuple(pairs))


async def _body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "")
    # Servers have checked that it is a number.
    if announced.isdecimal() and int(announced[:20]) > MOST_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise BadRequest("The form was broken off.") from None
    return bytes(body)


def _too_large() -> TooLarge:
    return TooLarge(
        f"The form is larger than {MOST_BYTES // 1_000_000} MB.", "Change such a value in a program instead."
    )
