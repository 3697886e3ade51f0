"""Names of tables, indexes and functions that fit into PostgreSQL's 63 bytes."""

from __future__ import annotations

import hashlib

_LONGEST = 63
_DIGEST = 8
"""The length of the digest of a name that is too long."""


def object_name(*parts: str) -> str:
    """Return ``parts`` as one identifier; a name that is too long is cut, and ends in a digest of the whole."""
    name = "_".join(parts)
    if len(name.encode()) <= _LONGEST:
        return name
    return f"{_cut(name)}_{hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]}"


def is_name_of(name: str, *parts: str) -> bool:
    """Return whether :func:`object_name` may have made a name from ``parts``, and perhaps more parts after them."""
    whole = "_".join(parts)
    return f"{name}_".startswith(f"{whole}_") or name[:-_DIGEST] == f"{_cut(whole)}_"


def _cut(name: str) -> str:
    return name.encode()[: _LONGEST - _DIGEST - 1].decode(errors="ignore")
