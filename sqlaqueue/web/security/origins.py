"""The check of where a POST comes from, against requests that another site makes in the user's name.

Browsers send Sec-Fetch-Site to https origins and to this machine, and Origin with every POST. A page cannot set either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlaqueue.web.errors import Forbidden

_ADVICE = "Open the dashboard itself and try again. Behind a proxy, give its address: Dashboard(..., origins=[...])."


def check_origin(headers: Mapping[str, str], scheme: str, origins: Collection[str]) -> None:
    """Refuse a POST that was not made by a page of the dashboard.

    :param headers: the headers of the request.
    :param scheme: http or https.
    :param origins: the origins under which browsers reach the dashboard.
    :raises Forbidden: for a POST from elsewhere, and from programs that name no origin.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    own = {f"{scheme}://{headers.get('host', '').lower()}", *origins}
    if origin is not None and origin.lower() in own:
        # The two must not contradict each other. A proxy that ends TLS makes the scheme differ, not the site.
        if site in {None, "same-origin"}:
            return
    elif site == "same-origin" and origin != "null":
        return
    raise Forbidden("This request was not made by a page of the dashboard, so it was not carried out.", _ADVICE)
