"""The recipes of the documentation, taken apart: what a reader would paste is what these tests run."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|sql)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """One page."""

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
    def tables(self) -> str:
        """The tables as they are before the library comes."""
        return "".join(self.blocks("The tables", "sql")[:1])

    @property
    def added(self) -> str:
        """What the library adds to them."""
        return "".join(self.blocks("What sqlaqueue adds", "sql"))

    def program(self, url: str) -> ModuleType:
        """Execute what defines the model and the consumer, and return its names."""
        *_, consumer = (block for block in self.blocks("The consumer", "python") if "consumer = " in block)
        added = self.blocks("What sqlaqueue adds", "python")
        code = "".join([*self.blocks("The model", "python"), *added, consumer])
        code = code.replace('"postgresql+psycopg://localhost/app"', repr(url)).replace("\nconsumer.run()", "")
        module = ModuleType(f"recipe_{self.name.replace('-', '_')}")
        # SQLAlchemy looks the names of annotations up in the module of a class.
        sys.modules[module.__name__] = module
        exec(compile(code, f"{self.name}.md", "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own
        return module
