"""Write the pictures of the dashboard that the documentation shows: ``python -m tests.web.browser.screenshots``.

The jobs are those of the example, the same each time. Pictures are reduced to a palette, as each is below 200 kB.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image

from tests.servers import choose_versions, find_installations, running
from tests.web.browser.conftest import View, viewing
from tests.web.browser.conftest import running as running_browser
from tests.web.browser.example import PAGES, Site, example_site, fill_database

FOLDER = Path(__file__).parents[3] / "docs" / "_static"
WINDOW = (1280, 860)
COLORS = 200


class Picture(NamedTuple):
    """One picture.

    :param name: the end of the file's name.
    :param page: the name of the page, or its path.
    :param query: is added to its path.
    :param part: what is shown of it, as a CSS selector; all of it by default.
    :param scheme: the colours that the reader prefers.
    """

    name: str
    page: str
    query: str = ""
    part: str = ""
    scheme: Literal["light", "dark"] = "light"


_LIST = "state%3Dfailed%26columns%3Dcustomer_id%2Cto%2Csubject%2Clast_error%2Cfinished_at"
_OF_ALL = f"queues/email/confirm?action=requeue&all=1&state=failed&list={_LIST}"
PICTURES = [
    *(Picture(page, page) for page in ("overview", "queue", "failures", "jobs", "job", "claim", "workers")),
    *(Picture(page, page) for page in ("health", "audit")),
    Picture("overview-dark", "overview", scheme="dark"),
    Picture("history", "queue", "?span=day", "#history"),
    Picture("search", "search", "%20error:TimeoutError"),
    Picture("confirm", _OF_ALL),
]


def write_screenshots(site: Site, folder: Path, pictures: Sequence[Picture] = PICTURES) -> list[Path]:
    written = []
    with running_browser() as browser:
        for picture in pictures:
            with viewing(browser, site.root, size=WINDOW, scheme=picture.scheme) as view:
                # The first page of a browser learns its time zone.
                view.open().settle()
                view.open(PAGES.get(picture.page, picture.page) + picture.query)
                written.append(_shoot(view, folder / f"dashboard-{picture.name}.png", picture.part))
    return written


def _shoot(view: View, path: Path, part: str) -> Path:
    # Without the empty space below a short page.
    end = view.settle().run("() => document.querySelector('main').getBoundingClientRect().bottom")
    if part:
        view.page.locator(part).screenshot(path=path, animations="disabled", caret="hide")
    else:
        view.screenshot(path, height=int(end) - 24)
    with Image.open(path) as image:
        # By maximum coverage: the red of a single badge must not become the mean of its neighbours.
        reduced = image.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
    return path


def _prepare(site: Site) -> None:
    """Make the server one like those of applications, with one thing that is wrong."""
    with site.database.connect() as connection:
        # The servers of tests need not survive a crash of the machine.
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = on")  # type: ignore[arg-type] # a name of this list
        connection.execute("SELECT pg_reload_conf()")
    site.execute("ALTER TABLE thumbnail DISABLE TRIGGER sqlaqueue_message_insert")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.web.browser.screenshots", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="such as overview or jobs; all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them")
    arguments = parser.parse_args()
    wanted = [each for each in PICTURES if not arguments.names or each.name in arguments.names]
    version = choose_versions("newest", find_installations())
    with running(version) as servers, servers.shared(version[0]).database() as database:
        fill_database(database)
        with example_site(database) as site:
            _prepare(site)
            for path in write_screenshots(site, arguments.folder, wanted):
                print(f"{path}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
