"""The errors that are answered with a page of their own."""

from __future__ import annotations


class PageError(Exception):
    """A request that cannot be served: what is wrong, and what to do next, in one sentence each."""

    status = 500
    title = "Something went wrong"

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.text, self.advice = text, advice


class BadRequest(PageError):
    status, title = 400, "This address is wrong"


class Forbidden(PageError):
    status, title = 403, "Not allowed"


class NotFound(PageError):
    """There is no such page, queue or job; or the user does not see it."""

    status, title = 404, "Not found"


class TooLarge(PageError):
    status, title = 413, "Too large"


class TooSlow(PageError):
    status, title = 408, "Too slow"


class Misdirected(PageError):
    """The Host of the request is not one of the dashboard's."""

    status, title = 421, "Not available under this name"


class ServiceUnavailable(PageError):
    status, title = 503, "The database does not answer"


class TooManyWindows(PageError):
    status, title = 429, "Too many open windows"


class Busy(ServiceUnavailable):
    title = "Busy"
