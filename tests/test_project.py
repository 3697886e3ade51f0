"""The project itself: the shape of its code, as CONTRIBUTING.md describes it, its command, and its quick tests."""

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

import sqlaqueue
from sqlaqueue.cli import main
from sqlaqueue.preparation import PreparePlugin
from tests.nearest import FOLDERS, ROOT, nearest

PACKAGE = ROOT / "sqlaqueue"
FILES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
NAMESPACES = "admin alembic citus exc log otel prometheus sessions telemetry testing testing.conformance web"
PUBLIC = ["sqlaqueue", *(f"sqlaqueue.{name}" for name in NAMESPACES.split())]
MOST_FILES, MOST_LINES, MOST_IN_FOLDER, SMALL = 245, 700, 25, 100
SMALL_FILES: dict[str, str] = {}
"""The small files that only one other file imports, each with the reason why it is a file."""
SEVERAL_MEANINGS = {
    "Attempt": "public: one that has ended, in admin; one that runs, for telemetry",
    "Moment": "the type of SQLite, and that of MariaDB",
    "StatementCompiler": "that of SQLite, and that of MariaDB",
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


@cache
def imports() -> dict[str, set[str]]:
    return {name: set(imported(name, path)) for name, path in MODULES.items()}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _crud_parameter() -> object:
    table = sa.table("t", sa.column("a"))
    return sa.update(table).values(a=1).compile().binds["a"]


def _with_a_hook() -> object:
    class Construct(FunctionElement[int]):
        inherit_cache = True

    compiles(Construct)(lambda *_, **__: "1")
    return Construct


OF_SQLALCHEMY: dict[str, Callable[[], object]] = {
    "_compiler_dispatcher": _with_a_hook,
    "_is_crud": _crud_parameter,
    "_on_connect_isolation_level": lambda: sa.create_engine("sqlite://").dialect,
    "_ordered_values": lambda: sa.update(sa.table("t")) if sa.__version__ < "2.1" else None,
    "_type_memos": lambda: sa.create_engine("sqlite://").dialect,
    "_values": lambda: sa.update(sa.table("t")),
    "_where_criteria": lambda: sa.update(sa.table("t")),
    "_with_options": lambda: sa.select(sa.literal(1)),
}
"""The private names of SQLAlchemy that the engines use, each with what has it. Checked with 2.0.32 to 2.1."""
OF_DRIVERS = {"_read_timeout"}


@pytest.mark.once
def test_the_engines_use_few_private_names() -> None:
    """Each has the name and the meaning that the code relies on, in the SQLAlchemy that is installed."""
    used = set[str]()
    for folder in ("engines", "sqlite", "mariadb"):
        for path in (PACKAGE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and not (
                    isinstance(node.value, ast.Name) and node.value.id == "self"
                ):
                    used.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    used.add(node.value)
    private = {name for name in used if name.startswith("_") and name.isidentifier() and not name.endswith("_")}
    own = {name for name in private if name.startswith("_sqlaqueue")}
    assert private - own - OF_DRIVERS == OF_SQLALCHEMY.keys()
    for name, make in OF_SQLALCHEMY.items():
        has_it = make()
        assert has_it is None or hasattr(has_it, name), name


@pytest.mark.once
def test_each_picture_is_shown() -> None:
    """A picture or figures that no page shows are forgotten when the dashboard changes."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"_static/([\w-]+\.(?:png|svg|jsonl))", page.read_text())}
    assert {path.name for path in (ROOT / "docs" / "_static").iterdir()} == shown


@pytest.mark.once
def test_there_are_few_files() -> None:
    assert len(FILES) <= MOST_FILES
    folders = Counter(path.parent for path in FILES.values())
    assert {folder.name: count for folder, count in folders.items() if count > MOST_IN_FOLDER} == {}


@pytest.mark.once
def test_no_file_is_long() -> None:
    assert {name: lines(path) for name, path in FILES.items() if lines(path) > MOST_LINES} == {}


@pytest.mark.once
def test_a_small_file_with_one_importer_has_a_reason() -> None:
    importers = Counter(target for targets in imports().values() for target in targets)
    small = {
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and lines(path) < SMALL and importers[name] == 1
    }
    assert small == set(SMALL_FILES)


@pytest.mark.once
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


@pytest.mark.once
@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_docstrings(module: str) -> None:
    assert list(undocumented(module)) == []


@pytest.mark.once
def test_imports_make_no_circle() -> None:
    # A package imports its modules, so that they may import it: only what modules import of each other counts.
    open_, done = set[str](), set[str]()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in open_, " -> ".join((*path, name))
        if name in done:
            return
        open_.add(name)
        for target in sorted(imports()[name]):
            if MODULES[target].name != "__init__.py":
                visit(target, (*path, name))
        open_.remove(name)
        done.add(name)

    for name, path in MODULES.items():
        if path.name != "__init__.py":
            visit(name, ())


# -- the README shows the command that CI runs ---------------------------------------------------------------------


@pytest.mark.once
def test_the_readme_and_ci_give_the_same_test_command() -> None:
    *_, command = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command.endswith("nox")
    assert command in (ROOT / "README.md").read_text().splitlines()


# -- the tests that ``nox -s quick`` chooses -----------------------------------------------------------------------
CHANGED = "tests/unique/test_enqueue.py"
IMPORTING = "tests/unique/test_config.py::test_a[1]"
BESIDE = "tests/unique/test_mappings.py::test_b"
OTHER = "tests/web/test_live.py::test_c"


def chosen(changed: list[str], seconds: float, **took: float) -> set[str]:
    tests = [f"{CHANGED}::test_slow", IMPORTING, BESIDE, OTHER]
    return nearest(tests, changed, {f"{CHANGED}::test_slow": 60, **took}, seconds)


@pytest.mark.once
def test_a_changed_file_comes_first_however_slow_it_is() -> None:
    assert chosen([CHANGED], 60) == {f"{CHANGED}::test_slow"}


@pytest.mark.once
def test_tests_that_import_a_changed_module_come_before_their_folder() -> None:
    module = "tests/unique/models.py"
    assert "tests.unique.models" in (ROOT / "tests/unique/test_config.py").read_text()
    assert IMPORTING in chosen([module], 1)
    assert OTHER not in chosen([module], 1)


@pytest.mark.once
def test_the_folder_of_a_changed_package_comes_before_the_others() -> None:
    assert OTHER not in chosen(["sqlaqueue/unique/enqueue.py"], 1)
    assert chosen(["sqlaqueue/web/charts.py"], 0.5) == {OTHER}


@pytest.mark.once
def test_all_are_chosen_where_the_time_suffices() -> None:
    assert len(chosen([], 1000)) == 4


@pytest.mark.once
def test_each_package_has_tests() -> None:
    packages = {path.parent.name for path in (ROOT / "sqlaqueue").glob("*/__init__.py")}
    for package in packages:
        for folder in FOLDERS.get(package, [package]):
            assert Path(ROOT, "tests", folder).is_dir(), package


@pytest.mark.once
def test_one_description_stands_everywhere() -> None:
    said = "Job queues for SQLAlchemy: a job is a row of your own model"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"] == said
    assert inspect.getdoc(sqlaqueue).partition("\n")[0] == inspect.getdoc(main).partition("\n")[0] == f"{said}."
    for page in ("README.md", "docs/index.md"):
        assert f"\n\n{said}." in (ROOT / page).read_text()


@pytest.mark.once
def test_what_an_installation_names_is_there() -> None:
    """An installed package has copied these names, so that the other tests do not read them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = {name: EntryPoint(name, at, "") for name, at in project["entry-points"]["sqlalchemy.plugins"].items()}
    assert {name: each.load() for name, each in plugins.items()} == {"sqlaqueue": PreparePlugin}
    assert EntryPoint("", project["scripts"]["sqlaqueue"], "").load() is main
