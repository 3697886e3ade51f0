"""``python -m tests.conformance`` prints the table of docs/engines.md; with ``--write`` it writes the page."""

from __future__ import annotations

import sys

from tests.conformance.engines_table import PAGE, lines, page

if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        sys.stdout.write("\n".join([*lines(), ""]))
