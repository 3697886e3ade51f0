"""Everything that the project promises, checked: ``nox`` runs it, ``nox --list`` names the parts.

The tests run on a matrix of Python, SQLAlchemy and PostgreSQL: each Python from 3.11 that is
installed here, each SQLAlchemy in `SQLALCHEMY`, and each PostgreSQL that ``tests.servers`` finds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
# uv installs in seconds what takes pip a minute in each environment.
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "static", "tests"]

SQLALCHEMY = ["2.1.*", "2.0.*", "2.0.32"]
LATEST_SQLALCHEMY = SQLALCHEMY[:2]

# The newest versions run all but what is left to `full`. Each other version runs the tests that are marked `everywhere`
# and a part of the rest, so that one test in 32 meets other versions than the newest.
NEWEST = ["-m", "not thorough and not browser"]
ELSEWHERE = ["-m", "not thorough and not once and not browser"]
SHARES = 32

# More than there are cores: many a test waits for a process, or for a lease. Three times as many took a tenth longer.
PROCESSES = min(2 * (os.cpu_count() or 1) + 1, 8)
PYTEST = ["pytest", f"--numprocesses={PROCESSES}"]
# One a core: where few tests run, each process takes longer to import them all.
FEW = ["pytest", f"--numprocesses={os.cpu_count() or 1}"]
BROWSER = [*FEW, "tests/web/browser"]
SITE = ["sphinx-build", "--quiet", "--fail-on-warning", "--keep-going", "docs", "build/docs"]


def find_pythons() -> dict[str, Path]:
    """Return an interpreter for each version from 3.11 that is installed, oldest first.

    Each is started once: pyenv puts names on the PATH that only fail, for versions it has not
    activated, while the real interpreters are not on the PATH.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    directories = [
        *sorted(pyenv.glob("versions/3.*/bin"), reverse=True),
        *map(Path, os.get_exec_path()),
        Path(sys.executable).parent,
    ]
    found: dict[str, Path] = {}
    for directory in directories:
        for candidate in directory.glob("python3.*"):
            version = re.fullmatch(r"python(3\.1[1-9])", candidate.name)
            if version and version[1] not in found and runs(candidate):
                found[version[1]] = candidate
    return dict(sorted(found.items()))


def runs(interpreter: Path) -> bool:
    """Tell whether it starts and is a release: the drivers have no wheels for anything else."""
    check = "import sys; sys.exit(sys.version_info.releaselevel != 'final')"
    process = subprocess.run([interpreter, "-c", check], capture_output=True, check=False)
    return process.returncode == 0


PYTHONS = find_pythons()
# nox takes them from the PATH, under the names that its sessions then have.
os.environ["PATH"] = os.pathsep.join([*(str(python.parent) for python in PYTHONS.values()), os.environ["PATH"]])

# Each module is compiled when it is first imported: most of what is installed never is.
os.environ["PIP_NO_COMPILE"] = "1"


def each_version(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    """Combine the versions so that each is met, in as few combinations as can be: first the newest ones.

    A defect of one version shows beside any version of the others, as far as any was seen; `full` runs all of them.
    """
    rows = range(max(map(len, axes.values())))
    return [{name: versions[min(row, len(versions) - 1)] for name, versions in axes.items()} for row in rows]


def matrix(session: nox.Session) -> dict[str, list[str]]:
    """Return the axes, the newest versions first."""
    postgres = str(session.run("python", "-m", "tests.servers", silent=True)).split()
    return {"python": [*PYTHONS][::-1], "sqlalchemy": SQLALCHEMY, "postgres": postgres[::-1]}


def prepare(session: nox.Session, combination: dict[str, str]) -> list[str]:
    """Install the SQLAlchemy of this combination; return the options that its tests need."""
    session.log(", ".join(f"{name} {version}" for name, version in combination.items()))
    # Hundreds of processes import the same modules, and each would compile them where this is set.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.install("--upgrade", f"sqlalchemy=={combination['sqlalchemy']}")
    return [f"--postgres={combination['postgres']}", *session.posargs]


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style, the format, and which module imports which."""
    session.install("-e.[lint]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")


@nox.session(python=[*PYTHONS][-1:])
def quick(session: nox.Session) -> None:
    """Check a change in three minutes: its style, and the tests that are nearest to what differs from main."""
    session.install("-e.[lint,test]")
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")
    session.run(*PYTEST, *NEWEST, f"--nearest={PROCESSES * 55}", *session.posargs)


@nox.session
def static(session: nox.Session) -> None:
    """Check the types, of the package and of user code, against each SQLAlchemy in use; build the documentation."""
    session.install("-e.[docs,lint,test]")
    newest, oldest = LATEST_SQLALCHEMY
    # Side by side: none uses more than one core. What one prints comes in one piece, when it fails as well.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for sqlalchemy, commands in (
            (newest, [["pyright"], ["mypy"], SITE]),
            (oldest, [["pyright", "tests/typing"], ["mypy"]]),
        ):
            session.install("--upgrade", f"sqlalchemy=={sqlalchemy}")
            for output in pool.map(lambda command: session.run(*command, silent=True), commands):
                session.log(str(output).strip())


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation as a site, in build/docs; its snippets are run by the tests."""
    session.install("-e.[docs]")
    session.run(*SITE)


@nox.session(python=[*PYTHONS][-1:])
def release(session: nox.Session) -> None:
    """Build what would be published, in build/release, and check it: contents, extras, licences, vulnerabilities.

    ``uv publish build/release/*.whl build/release/*.tar.gz`` would then publish it.
    """
    session.install("build[uv]==1.6.1", "cyclonedx-bom==7.5.0", "pip-audit==2.10.1", "twine==7.0.0", "uv")
    # Files in an archive have the time of the commit, so that a second build has equal bytes.
    commit = session.run("git", "log", "-1", "--format=%ct", external=True, silent=True)
    session.env["SOURCE_DATE_EPOCH"] = str(commit).strip()
    directory, again = "build/release", "build/release/again"
    shutil.rmtree(directory, ignore_errors=True)
    for output in (directory, again):
        session.run("python", "-m", "build", "--quiet", "--installer=uv", f"--outdir={output}")
    files = [str(file) for suffix in ("whl", "tar.gz") for file in Path(directory).glob(f"*.{suffix}")]
    session.run("twine", "check", "--strict", *files)
    environment = f"{directory}/env"
    session.run("uv", "venv", "--quiet", environment)
    extras = "standard,asyncpg,aiosqlite,pymysql,asyncmy,otel,prometheus,web"
    python = f"{environment}/bin/python"
    session.run("uv", "pip", "install", "--quiet", f"--python={python}", f"{files[0]}[{extras}]")
    bill = f"{directory}/sqlaqueue.cdx.json"
    session.run("cyclonedx-py", "environment", "--output-reproducible", f"--output-file={bill}", python)
    session.run("python", "-m", "tests.release", directory, again)
    # Last, since it needs PyPI's list of vulnerabilities, which a mirror may lack; --strict fails without it.
    session.run("uv", "pip", "uninstall", "--quiet", f"--python={python}", "sqlaqueue")
    (packages,) = Path(environment).glob("lib/*/site-packages")
    session.run("pip-audit", "--strict", "--progress-spinner=off", f"--path={packages}")


@nox.session(python=[*PYTHONS][-1:])
def browser(session: nox.Session) -> None:
    """Test the dashboard in a real browser, which Debian's package chromium installs."""
    session.install("-e.[test]")
    session.run(*BROWSER, *session.posargs)


@nox.session(python=[*PYTHONS][-1:])
def citus(session: nox.Session) -> None:
    """Test Citus: ``nox -s citus -- URL``, of a database of a cluster, or a directory with its programs."""
    if not session.posargs:
        session.error("give the URL of a database with Citus, or BIN_DIR: nox -s citus -- URL; see docs/citus.md")
    session.install("-e.[test]")
    place, *options = session.posargs
    # The conformance suite ends connections of its database: several processes need a cluster each.
    pytest = ["pytest"] if "://" in place else PYTEST
    session.run(*pytest, "tests/citus", f"--citus={place}", *options)


@nox.session(python=[*PYTHONS])
def tests(session: nox.Session) -> None:
    """Test with each version of everything: all tests with the newest ones."""
    # Else six processes compile the same modules at the same time.
    session.install("-e.[test]", env={"UV_COMPILE_BYTECODE": "1"} if session.python == [*PYTHONS][-1] else {})
    newest, *others = each_version(matrix(session))
    for number, combination in enumerate(others, start=1):
        if combination["python"] == session.python:
            part = f"--part={number}/{SHARES * len(others)}"
            session.run(*FEW, *prepare(session, combination), *ELSEWHERE, part)
    # Last, because the end of the output is what is read.
    if newest["python"] == session.python:
        options = prepare(session, newest)
        if not session.posargs:
            session.run(*BROWSER, "-m", "not thorough")
        session.run("coverage", "erase")
        session.run("coverage", "run", "-m", *PYTEST, *options, *NEWEST)
        session.run("coverage", "combine", "--quiet")
        # A part of the tests, asked for by hand, need not cover everything.
        session.run("coverage", "report", *(["--fail-under=0"] if session.posargs else []))


@nox.session(python=[*PYTHONS][-1:])
def branches(session: nox.Session) -> None:
    """Measure which branches the tests of the newest versions take: this takes twice as long as without."""
    session.install("-e.[test]")
    axes = matrix(session)
    newest = {name: values[0] for name, values in axes.items()}
    session.run("coverage", "erase")
    # Python itself tells of branches only from 3.14 on.
    session.env["COVERAGE_CORE"] = "ctrace"
    session.run("coverage", "run", "--branch", "-m", *PYTEST, *prepare(session, newest), *NEWEST)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(python=[*PYTHONS])
def full(session: nox.Session) -> None:
    """Run all tests on every combination: this takes long."""
    session.install("-e.[test]")
    axes = matrix(session)
    for sqlalchemy, postgres in product(axes["sqlalchemy"], axes["postgres"]):
        combination = {"sqlalchemy": sqlalchemy, "postgres": postgres}
        session.run(*PYTEST, *prepare(session, combination))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure sqlaqueue beside other queues, each in an environment of its own under build/benchmarks."""
    session.install("-e.[demo]", "matplotlib==3.10.7")
    # One part of the measurements has a command of its own.
    command = [] if session.posargs[:1] == ["snapshot"] else ["run"]
    session.run("python", "-m", "docs.benchmarks", *command, *session.posargs)


@nox.session(python=[*PYTHONS][-1:])
def soak(session: nox.Session) -> None:
    """Run all features for hours under random faults, and look for leaks: ``nox -s soak -- HOURS``."""
    session.install("-e.[test]", "matplotlib==3.10.7")
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.run("python", "-m", "tests.soak", *session.posargs)
