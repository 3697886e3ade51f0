"""Public objects show in their docstrings how they are used, and these examples run on a database."""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sqlaqueue import AsyncConsumer, Consumer, exc
from tests.docs.test_pages import engines as engines  # noqa: PLC0414 - a fixture
from tests.servers import Database
from tests.test_project import PUBLIC

pytestmark = pytest.mark.once

EXAMPLE = re.compile(r"::\n\n((?:(?: {4}.*)?\n)+)")
SETTING = (Path(__file__).parent / "setting.py").read_text()
"""What the examples take as given: a model, a database with its table, and sessions."""


def public() -> Iterator[tuple[str, Any]]:
    """Yield each public function and class, once, with the name by which it is imported."""
    seen = set[int]()
    for module in map(import_module, PUBLIC):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module.__name__}.{name}", value


def docstrings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the docstring of an object, and those of the methods that its class defines."""
    yield name, inspect.getdoc(value) or ""
    for member, defined in vars(value).items() if inspect.isclass(value) else ():
        if not member.startswith("_") and (inspect.isroutine(defined) or isinstance(defined, property)):
            yield f"{name}.{member}", inspect.getdoc(defined) or ""


def examples(docstring: str) -> list[str]:
    return [textwrap.dedent(found[1]).strip("\n") for found in EXAMPLE.finditer(docstring + "\n")]


@pytest.mark.parametrize("module", PUBLIC)
@pytest.mark.usefixtures("engines")
def test_the_examples_run(module: str, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # drain() does the same without waiting for SIGTERM.
    monkeypatch.setattr(Consumer, "run", Consumer.drain)
    monkeypatch.setattr(AsyncConsumer, "run", AsyncConsumer.drain)
    monkeypatch.chdir(tmp_path)
    failed = {}
    for name, value in public():
        if name.rpartition(".")[0] != module:
            continue
        for member, docstring in docstrings(name, value):
            if found := examples(docstring):
                try:
                    execute(f"from {module} import *", "\n".join(found), member, database)
                except Exception as error:  # noqa: BLE001 - one example does not keep the others from being run
                    failed[member] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())


def is_only_raised(value: Any) -> bool:
    """Return whether a class is an error that the library raises, and a program only catches."""
    return inspect.isclass(value) and issubclass(value, exc.SqlaqueueError)


def test_each_public_object_has_an_example() -> None:
    lacking = [
        name for name, value in public() if not is_only_raised(value) and not examples(inspect.getdoc(value) or "")
    ]
    assert not lacking


def execute(imports: str, code: str, name: str, database: Database) -> None:
    """Execute an example, in a module of its own, with what the setting gives and the names beside its object."""
    module = ModuleType("example")
    # SQLAlchemy looks up the names of annotations in the module of a class.
    sys.modules[module.__name__] = module
    with_urls: Callable[[str], str] = lambda text: re.sub(  # noqa: E731 - it is used twice, here
        r'"postgresql\+(psycopg|asyncpg)://localhost/app"', lambda found: repr(database.url(found[1])), text
    )
    try:
        exec(compile(with_urls(SETTING), "setting", "exec", dont_inherit=True), vars(module))  # noqa: S102 - our own
        exec(imports, vars(module))  # noqa: S102 - our own
        # The example may give these names to something else.
        session, engine, async_session, async_engine = operator.itemgetter(
            "session", "engine", "async_session", "async_engine"
        )(vars(module))
        compiled = compile(with_urls(code), name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)

        async def run() -> None:
            try:
                # A coroutine only if the example awaits something.
                if (awaited := eval(compiled, vars(module))) is not None:  # noqa: S307 - our own
                    await awaited
            finally:
                await async_session.close()
                await async_engine.dispose()

        try:
            asyncio.run(run())
        finally:
            session.close()
            engine.dispose()
    finally:
        del sys.modules[module.__name__]
