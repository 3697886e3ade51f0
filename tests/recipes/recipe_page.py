"""The recipes of the documentation as data: these tests run the code that a reader would paste."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from tests.docs.pages import ROOT

BLOCK = re.compile(r"^```(python|sql)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """A page of docs/recipes."""

    name: str

    @cached_property
    def _sections(self) -> dict[str, str]:
        text = COMMENT.sub("", (ROOT / "docs" / "recipes" / f"{self.name}.md").read_text())
        parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    def blocks(self, section: str, language: str) -> list[str]:
        """Return the blocks of one language in one section."""
        return [code for kind, code in BLOCK.findall(self._sections.get(section, "")) if kind == language]

    @property
    def existing(self) -> list[str]:
        """The SQL of the existing tables, and then of their rows; nothing where the queue makes its own table."""
        return self.blocks("The existing table", "sql") + self.blocks("The existing tables", "sql")

    @property
    def tables(self) -> str:
        """The existing tables, before the library adds anything."""
        return "".join(self.existing[:1])

    @property
    def added(self) -> str:
        """What the library adds to the tables."""
        return "".join(self.blocks("What sqlaqueue adds", "sql"))

    def program(self, url: str) -> ModuleType:
        """Execute the definitions of the model and the Consumer, and return their names."""
        *_, consumer = (block for block in self.blocks("The Consumer", "python") if "consumer = " in block)
        added = self.blocks("What sqlaqueue adds", "python")
        code = "".join([*self.blocks("The model", "python"), *added, consumer])
        code = code.replace('"postgresql+psycopg://localhost/app"', repr(url)).replace("\nconsumer.run()", "")
        module = ModuleType(f"recipe_{self.name.replace('-', '_')}")
        # SQLAlchemy looks up the names of annotations in the module of a class.
        sys.modules[module.__name__] = module
        exec(compile(code, f"{self.name}.md", "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own
        return module
