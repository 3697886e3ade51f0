"""Inputs that are nearly valid: valid ones of a corpus, changed at random places."""

import random
import string
from collections.abc import Sequence

LONGEST = 20_000
"""Characters. A notification has 8,000 bytes at most, a form 8,000 characters in most fields."""

ODD = ["\0", "\t", "\n", "\x1b", "\x85", "\xa0", "²", "٣", "İ", "ß", "é", "\u200b", "\u202e", "\u2028", "\ufffd", "😀"]
PIECES = [
    *[
        "",
        " ",
        "  ",
        ":",
        "::",
        ",",
        ".",
        "..",
        "-",
        "+",
        "_",
        "/",
        "//",
        "\\",
        "'",
        '"',
        "%",
        "%s",
        "{}",
        "[]",
        "*",
        "~",
    ],
    *["0", "00", "-0", "-1", "1e999", "-1e-999", "1E999999999999999999999", "NaN", "Infinity", "0x10", "1_000", "1,5"],
    *["9" * 18, "9" * 19, "9" * 20, "9" * 400, "9" * 5000, "0." + "0" * 400 + "1", "null", "None", "true", "false"],
    *["\\u0000", "\\ud800", '{"a":', "[" * 50, "[" * 2000, "]" * 50, "((a+)+)+$", "a" * 300, " " * 3000, '"' * 101],
    *["0001-01-01", "9999-12-31", "10000-01-01", "T00:00Z", "T24:00", "+14:00", "-23:59", "+99:99", "infinity", " BC"],
    *[
        "../../etc/passwd",
        "https://",
        "@",
        "#",
        "?",
        "&a=b",
        "=",
        "<b>",
        "\r\n",
        "{{7*7}}",
        "60",
        "#6",
        "L",
        "W",
        "MON-",
    ],
]
CHARACTERS = [*string.printable, *ODD]


class Mutator:
    def __init__(self, rng: random.Random, corpus: Sequence[str]) -> None:
        self._rng, self._corpus = rng, corpus

    def input(self) -> str:
        """Return a text of the corpus with some changes; now and then one without a change."""
        text = self._rng.choice(self._corpus)
        for _ in range(self._rng.choice([0, 1, 1, 1, 2, 2, 3, 5, 10])):
            text = self._changed(text)[:LONGEST]
        return text

    def _changed(self, text: str) -> str:
        rng = self._rng
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice([0, 0, 1, 1, 2, 4, 8, 100]))
        match rng.randrange(8):
            case 0 | 1:
                between = rng.choice(CHARACTERS)
            case 2 | 3:
                between = rng.choice(PIECES)
            case 4:
                between = text[start:end] * rng.choice([2, 3, 50])
            case 5:
                other = rng.choice(self._corpus)
                between = other[rng.randint(0, len(other)) :]
            case 6:
                between = text[start:end][::-1]
            case _:
                between = ""
        return text[:start] + between + text[end:]
