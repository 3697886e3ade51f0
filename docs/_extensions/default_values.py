"""Signatures show the values of defaults: ``retry=Exponential()`` for a factory, ``timeout=10.0`` for a constant."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from datetime import timedelta
from functools import reduce
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_signature
from sphinx.application import Sphinx

FACTORY = "<factory>"
CONSTANT = re.compile(r"_?[A-Z][A-Z_]+")


def show_factories(
    _app: Sphinx, _what: str, _name: str, documented: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Replace each placeholder of a dataclass's signature, in the order of the fields."""
    if signature and FACTORY in signature and dataclasses.is_dataclass(documented):
        for field in dataclasses.fields(documented):
            if field.init and field.default_factory is not dataclasses.MISSING:
                signature = signature.replace(FACTORY, default_text(field.default_factory()), 1)
    return signature, returns


def show_constants(_app: Sphinx, domain: str, _kind: str, content: nodes.Element) -> None:
    """Replace the name of a constant by its value, in every overload."""
    signatures = [node for node in content.parent.children if isinstance(node, desc_signature)]
    for signature in signatures if domain == "py" else ():
        for default in signature.findall(nodes.inline):
            if "default_value" in default["classes"]:
                text = default.astext()
                if CONSTANT.fullmatch(text):
                    text = default_text(global_of(signature, text))
                default.clear()
                default.append(nodes.Text(text.replace("datetime.timedelta", "timedelta")))


def global_of(signature: desc_signature, name: str) -> Any:
    """Return what a name means in the module that defines the documented function."""
    documented = reduce(getattr, signature["fullname"].split("."), importlib.import_module(signature["module"]))
    return getattr(importlib.import_module(inspect.unwrap(documented).__module__), name)


def default_text(default: Any) -> str:
    """Return how a program writes a value; a dataclass without the fields that have their defaults."""
    if isinstance(default, timedelta):
        return f"timedelta(seconds={default.total_seconds():g})"
    if not dataclasses.is_dataclass(default) or isinstance(default, type):
        return repr(default)
    given = [
        f"{field.name}={getattr(default, field.name)!r}"
        for field in dataclasses.fields(default)
        if getattr(default, field.name) != field.default
    ]
    return f"{type(default).__name__}({', '.join(given)})"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-process-signature", show_factories)
    app.connect("object-description-transform", show_constants)
    return {"version": "1", "parallel_read_safe": True}
