"""The shape of the code, as CONTRIBUTING.md describes it: deep files, no circles, one meaning for a name."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import sqlaqueue

pytestmark = pytest.mark.once

ROOT = Path(sqlaqueue.__file__).parent
FILES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}

NAMESPACES = "admin alembic exc log mariadb otel prometheus sqlite telemetry testing testing.conformance web"
PUBLIC = ["sqlaqueue", *(f"sqlaqueue.{name}" for name in NAMESPACES.split())]

MOST_FILES, MOST_LINES, MOST_IN_FOLDER, SMALL = 230, 700, 25, 100

SMALL_FILES: dict[str, str] = {"sqlaqueue.waiting.async_wait": "it needs greenlet, which sync code may lack"}
"""The small files that only one other file imports, each with the reason why it is a file."""

SEVERAL_MEANINGS = {
    "Attempt": "public: one that has ended, in admin; one that runs, for telemetry",
    "Moment": "the type of SQLite, and that of MariaDB",
    "StatementCompiler": "that of SQLite, and that of MariaDB",
    "TableCompiler": "that of SQLite, and that of MariaDB",
    "TypeCompiler": "that of SQLite, and that of MariaDB",
}
"""The class names that are defined more than once, each with the reason."""


def imported(name: str, path: Path) -> Iterator[str]:
    """Yield the modules of the library that a module imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            # What is imported from a package may be one of its modules.
            names = [f"{node.module}.{each.name}" for each in node.names]
            names = [each if each in MODULES else str(node.module) for each in names]
        else:
            continue
        yield from (each for each in names if each in MODULES and each != name)


IMPORTS = {name: set(imported(name, path)) for name, path in MODULES.items()}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_there_are_few_files() -> None:
    assert len(FILES) <= MOST_FILES
    folders = Counter(path.parent for path in FILES.values())
    assert {folder.name: count for folder, count in folders.items() if count > MOST_IN_FOLDER} == {}


def test_no_file_is_long() -> None:
    assert {name: lines(path) for name, path in FILES.items() if lines(path) > MOST_LINES} == {}


def test_a_small_file_with_one_importer_has_a_reason() -> None:
    importers = Counter(target for targets in IMPORTS.values() for target in targets)
    small = {
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and lines(path) < SMALL and importers[name] == 1
    }
    assert small == set(SMALL_FILES)


def test_a_class_name_has_one_meaning() -> None:
    trees = (ast.parse(path.read_text()) for path in FILES.values())
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set(SEVERAL_MEANINGS)


def undocumented(module: str) -> Iterator[str]:
    """Yield the public functions, classes and methods of a module without a docstring of their own or of a base."""
    public = import_module(module)
    for name in getattr(public, "__all__", None) or [name for name in vars(public) if not name.startswith("_")]:
        value = getattr(public, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)) or not value.__module__.startswith("sqlaqueue"):
            continue
        # A dataclass without a docstring gets its signature as one.
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):
            yield f"{module}.{name}"
        for member, defined in vars(value).items() if inspect.isclass(value) else ():
            is_code = inspect.isfunction(getattr(defined, "__func__", defined)) or isinstance(defined, property)
            if is_code and not member.startswith("_") and not inspect.getdoc(getattr(value, member)):
                yield f"{module}.{name}.{member}"


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_docstrings(module: str) -> None:
    assert list(undocumented(module)) == []


def test_imports_make_no_circle() -> None:
    # A package imports its modules, so that they may import it: only what modules import of each other counts.
    open_, done = set[str](), set[str]()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in open_, " -> ".join((*path, name))
        if name in done:
            return
        open_.add(name)
        for target in sorted(IMPORTS[name]):
            if MODULES[target].name != "__init__.py":
                visit(target, (*path, name))
        open_.remove(name)
        done.add(name)

    for name, path in MODULES.items():
        if path.name != "__init__.py":
            visit(name, ())
