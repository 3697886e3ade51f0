"""JSON as indented text, with every number and string exactly as it was written."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_INDENT = "  "
_DEEPEST = 20


def indented(text: str) -> str:
    """Return JSON with a line for each element.

    It is not parsed: a parser would round numbers, and refuse integers of thousands of digits.
    """
    written: list[str] = []
    is_broken: list[bool] = []
    parts = _TOKEN.findall(text)
    for number, part in enumerate(parts):
        following = parts[number + 1] if number + 1 < len(parts) else ""
        if part in "{[":
            written.append(part)
            # Beyond some depth the indentation is most of the text: for 100 kB, up to 2 MB.
            is_broken.append(following not in "}]" and len(is_broken) < _DEEPEST)
            if is_broken[-1]:
                written.append("\n" + _INDENT * len(is_broken))
        elif part in "}]":
            if is_broken and is_broken.pop():
                written.append("\n" + _INDENT * len(is_broken))
            written.append(part)
        elif part == "," and is_broken and is_broken[-1]:
            written.append(",\n" + _INDENT * len(is_broken))
        else:
            written.append(f"{part} " if part in ",:" else part)
    return "".join(written)


def parse_exact(text: str) -> Any:
    """Return JSON as Python values.

    :raises ValueError: if it is no JSON, contains NaN or infinities, or a number that would be rounded.
    """

    def number(digits: str) -> float:
        value = float(digits)
        if Decimal(repr(value)) != Decimal(digits):
            msg = f"the number {digits[:50]} would be rounded; write it as a text, or change it in a program"
            raise ValueError(msg)
        return value

    def refuse(name: str) -> None:
        msg = f"{name} is no JSON"
        raise ValueError(msg)

    return json.loads(text, parse_float=number, parse_constant=refuse)
