"""The templates: Jinja2 with autoescape, so that a value is never HTML."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jinja2

from sqlaqueue.web.rendering.formats import capped, duration, moment, number, plain, short, shown, size

_FOLDER = Path(__file__).parents[1]
STATIC = _FOLDER / "static"


class Renderer:
    """Renders the templates of the dashboard."""

    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            each.__name__: each for each in (number, capped, duration, moment, short, plain, shown, size)
        }
        self.static_files = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.is_file()}
        """The contents of the static files by name; no other file can be asked for."""
        self.static_version = hashlib.sha256(b"".join(self.static_files.values())).hexdigest()[:12]
        """Changes with their contents, so that browsers can keep them for ever."""

    def render(self, template: str, **values: Any) -> str:
        """Return a page as text."""
        return self._environment.get_template(template).render(**values)
