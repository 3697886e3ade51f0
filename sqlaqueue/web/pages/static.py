"""The stylesheet, the script and the icon."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sqlaqueue.web.rendering.environment import Renderer

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}


def static_response(request: Request, renderer: Renderer) -> Response:
    """Return a static file. These are the same for everybody, so no access is needed."""
    name = request.path_params["file"]
    content = renderer.static_files.get(name)
    if content is None:
        return PlainTextResponse("Not found", status_code=404)
    current = request.query_params.get("v") == renderer.static_version
    cache = _FOR_EVER if current else {"Cache-Control": "no-cache"}
    media_type = _TYPES[name[name.rindex(".") :]]
    return Response(content, media_type=media_type, headers=cache)
