"""``python -m tests.flow_control.model [--deep] [NAME]``: search the designs, and print a table or one trace."""

from __future__ import annotations

import argparse
import sys

from tests.flow_control.model.search import search
from tests.flow_control.model.variants import ALTERNATIVES, BROKEN, HOLDS, HOLDS_DEEP, NOT_PROMISED, Variant

GROUPS = {
    "The design": HOLDS,
    "Promises that the design does not make": NOT_PROMISED,
    "Alternatives that make them": ALTERNATIVES,
    "Designs that lack a safeguard": BROKEN,
}
DEEP = {"The design, with wider bounds": HOLDS_DEEP}


def main() -> None:
    """Search what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.flow_control.model", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="a part of the name of a design; its trace is printed")
    parser.add_argument("--deep", action="store_true", help="search with wider bounds as well, for some minutes")
    arguments = parser.parse_args()
    for title, variants in (GROUPS | (DEEP if arguments.deep else {})).items():
        chosen = [variant for variant in variants if arguments.name in variant.name]
        if chosen:
            sys.stdout.write(f"\n{title:50}{'states':>10}  {'result':8}{'steps':>5}\n")
        for variant in chosen:
            _print(variant, with_trace=bool(arguments.name))


def _print(variant: Variant, *, with_trace: bool) -> None:
    result = search(variant.model)
    broken = result.fault.partition(":")[0] or "holds"
    sys.stdout.write(f"{variant.name:50}{result.states:10,}  {broken:8}{len(result.trace) or '':>5}\n")
    if with_trace:
        sys.stdout.write(f"{result}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
