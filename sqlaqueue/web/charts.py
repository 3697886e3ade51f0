"""Charts as SVG, made of numbers only.

Widths are in percent and heights in pixels, so that a chart is as sharp at any width, and its text has the same size.
Colours are those of the stylesheet. Each chart has a title and a description; bars have a table beside them, for
readers who do not see the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from sqlaqueue.web.rendering import duration, html, number

_PLOT = 120
"""The height of the bars in pixels."""
_TOP = 8
_SPARK = 28
_FILLED = 0.74
"""Which part of its place a bar fills; the rest is the gap to the next one."""
_LEAST = 1.5
"""The height of the smallest number, so that one failure among thousands is seen."""
_ROW = 44
_SCALE = {
    0.001: "1 ms",
    0.01: "10 ms",
    0.1: "100 ms",
    1.0: "1 s",
    10.0: "10 s",
    60.0: "1 min",
    600.0: "10 min",
    3600.0: "1 h",
    21600.0: "6 h",
    86400.0: "1 d",
    864000.0: "10 d",
    8640000.0: "100 d",
}
"""Durations at which the axis of a range chart has a tick, in seconds, and how they are written."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str
    """When it was, for the table and the tooltip."""
    parts: Mapping[str, int]
    """The number of each series."""
    is_partial: bool = False
    """Whether its period is not over."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """One row of a range chart; durations in seconds."""

    label: str
    p50: float
    p95: float
    p99: float


def bar_chart(
    chart_id: str, bars: Sequence[Bar], series: Sequence[str], *, title: str, description: str, ticks: Sequence[str]
) -> Markup:
    """Return stacked bars with an axis.

    :param chart_id: the id of the element, unique in the page.
    :param series: the names of the parts, from the bottom to the top; their classes in the stylesheet.
    :param ticks: texts along the horizontal axis, at equal distances from its beginning to its end.
    """
    most = nice_maximum(max((sum(bar.parts.values()) for bar in bars), default=0))
    drawn = Markup("").join(_bar(bar, place, len(bars), series, most) for place, bar in enumerate(bars))
    lines = Markup("").join(
        html('<line class="chart-line" x1="0" x2="100%" y1="{0}" y2="{0}"/>', _pixels(_TOP + y))
        for y in (0.5, _PLOT / 2)
    )
    scale = Markup("").join(
        html('<text x="100%" y="{}">{}</text>', _pixels(_TOP + y), number(value))
        for y, value in ((4, most), (_PLOT / 2 + 4, most // 2))
    )
    return Markup(
        '<figure class="chart" id="{id}"><div class="chart-row">'
        '<svg class="chart-bars" width="100%" height="{height}" role="img" aria-labelledby="{id}-title {id}-desc">'
        '<title id="{id}-title">{title}</title><desc id="{id}-desc">{description}</desc>{lines}'
        '<svg class="chart-plot" y="{top}" width="100%" height="{plot}">{drawn}</svg>'
        '<line class="chart-base" x1="0" x2="100%" y1="{base}" y2="{base}"/>{ticks}</svg>'
        '<svg class="chart-scale" width="44" height="{height}" aria-hidden="true">{scale}</svg>'
        "</div>{table}</figure>"
    ).format(
        id=chart_id,
        height=_TOP + _PLOT + 22,
        top=_TOP,
        plot=_PLOT,
        base=_pixels(_TOP + _PLOT - 0.5),
        title=title,
        description=description,
        lines=lines,
        drawn=drawn,
        ticks=_ticks(ticks, _TOP + _PLOT + 16),
        scale=scale,
        table=_table(bars, series, title),
    )


def sparkline(values: Sequence[int], *, title: str) -> Markup:
    """Return small bars without an axis, which a text beside them should explain."""
    most = max(values, default=0)
    slot = 100 / max(len(values), 1)
    drawn = Markup("").join(
        html(
            '<rect class="spark-bar" x="{}%" y="{}" width="{}%" height="{}" rx="1"/>',
            _percent(place * slot),
            _pixels(_SPARK - height),
            _percent(slot * _FILLED),
            _pixels(height + 2),
        )
        for place, height in ((place, _height(value, most, _SPARK)) for place, value in enumerate(values))
        if height
    )
    return Markup(
        '<svg class="spark" width="100%" height="{height}" role="img"><title>{title}</title>{drawn}'
        '<line class="chart-base" x1="0" x2="100%" y1="{base}" y2="{base}"/></svg>'
    ).format(height=_SPARK, base=_pixels(_SPARK - 0.5), title=title, drawn=drawn)


def range_chart(chart_id: str, rows: Sequence[Range], *, title: str, description: str) -> Markup:
    """Return a line for each row from its half to its slowest hundredth, on a common logarithmic scale."""
    least, most = _bounds(rows)
    ticks = [each for each in _SCALE if least <= each <= most]

    def at(seconds: float) -> float:
        # The dot of the median must not be cut at the border.
        share = math.log(max(seconds, least) / least) / math.log(most / least)
        return 2 + 94 * min(share, 1.0)

    height = len(rows) * _ROW
    lines = Markup("").join(
        Markup(
            '<line class="chart-line" x1="{0}%" x2="{0}%" y1="0" y2="{1}"/>'
            '<text x="{0}%" y="{2}" text-anchor="{3}">{4}</text>'
        ).format(_percent(at(tick)), height, height + 14, "middle" if place else "start", _SCALE[tick])
        for place, tick in enumerate(ticks)
    )
    drawn = Markup("").join(_range(row, place * _ROW, at) for place, row in enumerate(rows))
    return Markup(
        '<figure class="chart" id="{id}"><svg class="chart-ranges" width="100%" height="{height}" role="img" '
        'aria-labelledby="{id}-title {id}-desc"><title id="{id}-title">{title}</title>'
        '<desc id="{id}-desc">{description}</desc>{lines}{drawn}</svg></figure>'
    ).format(id=chart_id, height=height + 20, title=title, description=description, lines=lines, drawn=drawn)


def nice_maximum(value: int) -> int:
    """Return the first of 2, 4, 6, 8, 10, 12, 16, 20, 24, 30 ... that is not less: its half is an integer as well."""
    for end in (2, 4, 6, 8, 10):
        if value <= end:
            return end
    size = 1
    while True:
        for step in (12, 16, 20, 24, 30, 40, 60, 80, 100):
            if value <= step * size:
                return step * size
        size *= 10


def _bar(bar: Bar, place: int, places: int, series: Sequence[str], most: int) -> Markup:
    slot = 100 / places
    x, width = _percent(place * slot + slot * (1 - _FILLED) / 2), _percent(slot * _FILLED)
    tops: list[tuple[str, float]] = []
    top = 0.0
    for name in series:
        if value := bar.parts.get(name, 0):
            top += _height(value, most, _PLOT)
            tops.append((name, min(top, _PLOT)))
    drawn: list[Markup] = []
    # From the top to the bottom, each one over the one before: only the highest has round corners.
    for number_from_top, (name, height) in enumerate(reversed(tops)):
        y = _pixels(_PLOT - height)
        if number_from_top:
            gap = '<rect class="chart-gap" x="{}%" y="{}" width="{}%" height="1"/>'
            drawn.append(html(gap, x, _pixels(_PLOT - height - 0.5), width))
        rect = '<rect class="chart-{}" x="{}%" y="{}" width="{}%" height="{}"{}/>'
        # Longer than the plot, which cuts the round corners at the bottom.
        rounded = Markup("") if number_from_top else Markup(' rx="2"')
        drawn.append(html(rect, name, x, y, width, _pixels(height + 3), rounded))
    counted = ", ".join(f"{number(bar.parts[name])} {name}" for name in series if bar.parts.get(name))
    return html(
        '<g class="chart-bar{}"><title>{}</title>'
        '<rect class="chart-place" x="{}%" y="0" width="{}%" height="{}"/>{}</g>',
        Markup(" chart-bar--partial") if bar.is_partial else "",
        f"{bar.label}: {counted or 'none'}",
        _percent(place * slot),
        _percent(slot),
        _PLOT,
        Markup("").join(drawn),
    )


def _range(row: Range, top: float, at: Callable[[float], float]) -> Markup:
    y = top + 28
    texts = ", ".join(f"{name} {duration(value)}" for name, value in _named(row))
    return Markup(
        '<g><title>{label}: {texts}</title><text class="chart-name" x="0" y="{text}">{label}</text>'
        '<line class="chart-track" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        '<line class="chart-tail" x1="{p50}%" x2="{p99}%" y1="{y}" y2="{y}"/>'
        '<line class="chart-body" x1="{p50}%" x2="{p95}%" y1="{y}" y2="{y}"/>'
        '<line class="chart-end" x1="{p99}%" x2="{p99}%" y1="{above}" y2="{below}"/>'
        '<circle class="chart-median" cx="{p50}%" cy="{y}" r="5"/></g>'
    ).format(
        label=row.label,
        texts=texts,
        text=_pixels(top + 14),
        y=_pixels(y),
        above=_pixels(y - 5),
        below=_pixels(y + 5),
        **{name: _percent(at(value)) for name, value in _named(row)},
    )


def _named(row: Range) -> tuple[tuple[str, float], ...]:
    return ("p50", row.p50), ("p95", row.p95), ("p99", row.p99)


def _bounds(rows: Sequence[Range]) -> tuple[float, float]:
    scale = [*_SCALE]
    shortest = min((row.p50 for row in rows), default=scale[0])
    longest = max((row.p99 for row in rows), default=scale[1])
    least = max((each for each in scale[:-1] if each <= shortest), default=scale[0])
    most = min((each for each in scale if each >= longest and each > least), default=max(longest, scale[-1]))
    return least, most


def _ticks(texts: Sequence[str], y: float) -> Markup:
    last = len(texts) - 1
    made = []
    for place, text in enumerate(texts):
        anchor = "start" if place == 0 else "end" if place == last else "middle"
        # Those in between are left out where there is no room.
        tick = '<text{} x="{}%" y="{}" text-anchor="{}">{}</text>'
        minor = Markup(' class="chart-minor"') if place % 2 else ""
        made.append(html(tick, minor, _percent(100 * place / max(last, 1)), _pixels(y), anchor, text))
    return Markup("").join(made)


def _table(bars: Sequence[Bar], series: Sequence[str], title: str) -> Markup:
    heads = Markup("").join(html('<th scope="col" class="num">{}</th>', name) for name in series)
    rows = Markup("").join(
        html(
            '<tr><th scope="row">{}</th>{}</tr>',
            bar.label,
            Markup("").join(html('<td class="num">{}</td>', number(bar.parts.get(name, 0))) for name in series),
        )
        for bar in reversed(bars)
        if any(bar.parts.values())
    )
    return Markup(
        '<details class="chart-table"><summary>As a table</summary><div class="scroll" tabindex="0"><table>'
        '<caption class="visually-hidden">{}. Periods without any are left out.</caption>'
        '<thead><tr><th scope="col">From</th>{}</tr></thead><tbody>{}</tbody></table></div></details>'
    ).format(title, heads, rows)


def _height(value: int, most: int, height: int) -> float:
    return 0.0 if value <= 0 or most <= 0 else max(value / most * height, _LEAST)


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
