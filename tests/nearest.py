"""Which tests are nearest to a change, for ``nox -s quick``: as many as fit into the given time."""

import ast
import functools
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

UNKNOWN = 0.5
"""Seconds that a test is assumed to take which has not been run here before."""

FOLDERS = {
    "benchmark": ["benchmarks"],
    "demo": ["cli"],
    "otel": ["telemetry"],
    "postgresql": ["strategies", "doctor"],
    "queue": ["strategies", "mapping"],
    "sql": ["strategies", "mapping"],
    "statements": ["strategies", "admin"],
    "waiting": ["consumer"],
}
"""The folders of tests of the packages that have none of their own name."""


def changed_files() -> list[str]:
    """Return the files that differ from ``main``, with those that Git does not know yet; on ``main``, its last commit.

    They are relative to the root, as Git names them.
    """
    base = _git("merge-base", "HEAD", "main") or ["HEAD"]
    if base == _git("rev-parse", "HEAD") and not _git("status", "--porcelain"):
        base = ["HEAD~1"]
    return sorted({*_git("diff", "--name-only", *base), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def nearest(tests: Sequence[str], changed: Iterable[str], took: Mapping[str, float], seconds: float) -> set[str]:
    """Return those of ``tests``, ids of pytest, that are nearest to the changed files and together take ``seconds``.

    First come changed files of tests, then those that import a changed module, then those in the folders of its
    package, then all others, each from the quickest test on.

    :param took: the seconds that tests have taken before, by their ids.
    """
    ranks = _Ranks(list(changed))
    chosen, left = set[str](), seconds
    for test in sorted(tests, key=lambda test: (ranks.of(test.partition("::")[0]), took.get(test, UNKNOWN), test)):
        left -= took.get(test, UNKNOWN)
        if left < 0:
            break
        chosen.add(test)
    return chosen


class _Ranks:
    def __init__(self, changed: list[str]) -> None:
        self.changed = changed
        self.of = functools.cache(self._of)

    def _of(self, file: str) -> int:
        if file in self.changed:
            return 0
        if not imported_by(file).isdisjoint(map(module_of, self.changed)):
            return 1
        return 2 if any(file.startswith(f"tests/{folder}/") for folder in self.folders()) else 3

    def folders(self) -> Iterator[str]:
        for file in self.changed:
            first, *others = Path(file).with_suffix("").parts
            if first == "sqlaqueue" and others:
                yield from FOLDERS.get(others[0], others[:1])
            elif first == "docs":
                yield "docs"


def module_of(file: str) -> str:
    """Return the name of the module in a file, which is relative to the root."""
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def imported_by(file: str) -> set[str]:
    """Return the names that a file of the tests imports, itself or by way of other modules of the tests."""
    found, left = set[str](), [module_of(file)]
    while left:
        new = _imports(left.pop()) - found
        found |= new
        left += (name for name in new if name.startswith("tests."))
    return found


@functools.cache
def _imports(module: str) -> frozenset[str]:
    path = ROOT / f"{module.replace('.', '/')}.py"
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_bytes())) if path.is_file() else ():
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{each.name}" for each in node.names)])
    return frozenset(found)
