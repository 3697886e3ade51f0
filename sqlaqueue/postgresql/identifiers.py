"""Names of tables, indexes and functions that fit into PostgreSQL's 63 bytes."""

from __future__ import annotations

import hashlib

_LONGEST = 63


def object_name(*parts: str) -> str:
    """Return ``parts`` as one identifier; a name that is too long is cut, and ends in a digest of the whole."""
    name = "_".join(parts)
    if len(name.encode()) <= _LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    cut = name.encode()[: _LONGEST - len(digest) - 1].decode(errors="ignore")
    return f"{cut}_{digest}"
