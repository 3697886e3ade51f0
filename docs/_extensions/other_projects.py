"""Inventories for intersphinx, of the names of SQLAlchemy and Python that the reference mentions.

The real inventories are on the servers of these projects: a build that reads them fails whenever one cannot be reached.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

SQLALCHEMY = {
    "core/selectable.html#sqlalchemy.sql.expression.": {"sqlalchemy.sql.selectable": ["Select", "FromClause", "CTE"]},
    "core/sqlelement.html#sqlalchemy.sql.expression.": {"sqlalchemy.sql.elements": ["ColumnElement", "BindParameter"]},
    "core/metadata.html#sqlalchemy.schema.": {"sqlalchemy.sql.schema": ["Column", "Table"]},
    "core/constraints.html#sqlalchemy.schema.": {"sqlalchemy.sql.schema": ["Index"]},
    "core/dml.html#sqlalchemy.sql.expression.": {"sqlalchemy.sql.dml": ["Insert", "Update", "Delete"]},
    "core/type_api.html#sqlalchemy.types.": {"sqlalchemy.sql.type_api": ["TypeEngine"]},
    "core/exceptions.html#sqlalchemy.exc.": {"sqlalchemy.exc": ["DBAPIError"]},
    "orm/session_api.html#sqlalchemy.orm.": {"sqlalchemy.orm.session": ["Session"]},
    "orm/contextual.html#sqlalchemy.orm.": {"sqlalchemy.orm.scoping": ["scoped_session"]},
    "orm/mapping_api.html#sqlalchemy.orm.": {"sqlalchemy.orm.mapper": ["Mapper"]},
    "orm/extensions/asyncio.html#sqlalchemy.ext.asyncio.": {"sqlalchemy.ext.asyncio.session": ["AsyncSession"]},
}
PYTHON = {
    "library/datetime.html#datetime.": {"datetime": ["datetime", "timedelta"]},
    "library/uuid.html#uuid.": {"uuid": ["UUID"]},
    "library/collections.abc.html#collections.abc.": {
        "collections.abc": ["Awaitable", "Callable", "Collection", "Iterable", "Mapping", "MutableMapping", "Sequence"]
    },
}


def mapping() -> dict[str, tuple[str, str]]:
    """Return what ``intersphinx_mapping`` needs; the inventories are files of a temporary directory."""
    return {
        "sqlalchemy": ("https://docs.sqlalchemy.org/en/20/", _inventory("SQLAlchemy", SQLALCHEMY)),
        "python": ("https://docs.python.org/3/", _inventory("Python", PYTHON)),
    }


def _inventory(project: str, pages: dict[str, dict[str, list[str]]]) -> str:
    lines = "".join(f"{line}\n" for line in _lines(pages))
    header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The rest is compressed with zlib.\n"
    file = Path(tempfile.mkdtemp(prefix="sqlaqueue-inventory-")) / "objects.inv"
    file.write_bytes(header.encode() + zlib.compress(lines.encode()))
    return str(file)


def _lines(pages: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for address, modules in pages.items():
        for module, names in modules.items():
            yield from (f"{module}.{name} py:class 1 {address}{name} -" for name in names)
