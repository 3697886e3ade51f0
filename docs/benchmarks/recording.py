"""``python -m docs.benchmarks.recording`` runs the demo in a terminal, and draws it as ``docs/_static/demo.svg``.

The picture plays what the terminal showed, at its times. Without animation it is the last frame.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "_static" / "demo.svg"
COMMAND = ["sqlaqueue", "demo"]
COLUMNS, LINE, CHARACTER = 106, 19, 7.85
BETWEEN = 0.3
"""Seconds between two frames of the progress bar: all of them would make a large file."""
COLOURS = {"1": "bold", "91": "done", "90": "left"}
STYLE = """
  text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre }
  .bold { font-weight: bold; fill: #ffffff } .done { fill: #ff7b72 } .left { fill: #6e7681 } .prompt { fill: #3fb950 }
"""


def record() -> Iterator[tuple[float, str]]:
    """Run the demo, and yield what it writes with the seconds since its start."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    started = time.monotonic()
    process = subprocess.Popen(COMMAND, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the end, on Linux
            break
        if not data:
            break
        yield time.monotonic() - started, data.decode()
    if process.wait():
        raise SystemExit(process.returncode)


def frames(pieces: Iterator[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """Return the moments at which the screen has changed, each with its lines."""
    lines, found = [""], []
    for at, text in pieces:
        for part in re.split(r"(\r\n|\r\x1b\[2K)", re.sub(r"\x1b\[\?25[lh]", "", text)):
            if part == "\r\n":
                lines.append("")
            elif part == "\r\x1b[2K":
                lines[-1] = ""
            else:
                lines[-1] += part
        if not found or len(lines) != len(found[-1][1]) or at - found[-1][0] > BETWEEN:
            found.append((at, [*lines]))
    found.append((at, lines))
    return found


def draw(screens: list[tuple[float, list[str]]]) -> str:
    height = (max(len(lines) for _, lines in screens) + 2) * LINE
    width = round(COLUMNS * CHARACTER + 48)
    start, body = screens[0][0] - 1, ""
    rows = max(len(lines) for _, lines in screens)
    for row in range(rows):
        states: list[tuple[float, str]] = []
        for at, lines in screens:
            text = lines[row] if row < len(lines) else ""
            if not states or states[-1][1] != text:
                states.append((at - start, text))
        for number, (at, text) in enumerate(states):
            if not text.strip():
                continue
            if number + 1 < len(states):
                shown, until = "hidden", states[number + 1][0]
                change = f'<set attributeName="visibility" to="visible" begin="{at:.2f}s" end="{until:.2f}s"/>'
            else:
                # Without animation the picture is the last frame.
                shown = "visible"
                change = f'<set attributeName="visibility" to="hidden" begin="0s" end="{at:.2f}s"/>'
            body += f'<g visibility="{shown}">{change}{_line(text, row + 1)}</g>\n'
    prompt = f'<text x="16" y="{LINE * 1.3:g}"><tspan class="prompt">$</tspan> {" ".join(COMMAND)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">\n'
        '<title id="title">The demo: four workers process some thousand files, one is killed, nothing is lost</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>\n{prompt}\n{body}</svg>\n'
    )


def _line(text: str, row: int) -> str:
    spans, style = "", ""
    for part in re.split(r"(\x1b\[\d*m)", text):
        if part.startswith("\x1b"):
            style = COLOURS.get(part[2:-1], "")
        elif part:
            spans += f'<tspan class="{style}">{escape(part)}</tspan>' if style else escape(part)
    return f'<text x="16" y="{LINE * (row + 1.3):g}">{spans}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(frames(record())))
