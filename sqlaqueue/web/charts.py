"""Charts as SVG, made of numbers only.

Widths are in percent and heights in pixels, so that a chart is as sharp at any width, and its text has the same size.
Colours are those of the stylesheet. Each chart has a title and a description; bars have a table beside them, for
readers who do not see the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from markupsafe import Markup

from sqlaqueue.web.data.history import History, Point
from sqlaqueue.web.rendering import clock_text, duration, html, number

_LINES = 88
"""The height of a chart of lines in pixels."""
_PLOT = 120
"""The height of the bars in pixels."""
_TOP = 8
_SPARK = 28
_FILLED = 0.74
"""Which part of its place a bar fills; the rest is the gap to the next one."""
LONG_PERIOD = timedelta(hours=1)
"""The period from which on a chart covers several days, so that its places need a date."""
GAP = "no Consumer ran"
"""The text of a period of which nothing is known."""
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
    is_gap: bool = False
    """Whether nothing is known of its period."""


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


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A vertical axis: the heights of values, from 0 at the bottom to 1 at the top."""

    height_of: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]
    """Values that are written beside a line."""
    text: Callable[[float], str]
    """Writes a value."""

    @classmethod
    def linear(cls, most: float, text: Callable[[float], str]) -> Axis:
        ticks = [(most, text(most)), (most / 2, text(most / 2))]
        return cls(height_of=lambda value: value / most, ticks=ticks, text=text)

    @classmethod
    def of_counts(cls, values: Iterable[float]) -> Axis:
        return cls.linear(nice_maximum(int(max(values, default=0))), lambda value: number(int(value)))

    @classmethod
    def of_shares(cls, values: Iterable[float]) -> Axis:
        most = max(values, default=0.0)
        return cls.linear(next(each for each in _SHARES if each >= most), lambda value: f"{value:.3g} %")

    @classmethod
    def of_durations(cls, values: Iterable[float], *, logarithmic: bool) -> Axis:
        listed = [*values]
        most = max(listed, default=0.0)
        if not logarithmic:
            longest = _DURATIONS[-1] * nice_maximum(math.ceil(most / _DURATIONS[-1]))
            return cls.linear(next((each for each in _DURATIONS if each >= most), longest), duration)
        least, most = _bounds([Range(label="", p50=min(listed, default=0.0), p95=most, p99=most)])
        length = math.log(most / least)
        ticks = [(each, text) for each, text in _SCALE.items() if least < each <= most]
        return cls(
            height_of=lambda value: min(max(math.log(max(value, least) / least) / length, 0.0), 1.0),
            ticks=ticks,
            text=duration,
        )


_SHARES = (1, 2, 5, 10, 20, 50, 100)
"""The ends of an axis of percent."""

_DURATIONS = (1, 2, 10, 20, 60, 120, 600, 1200, 3600, 7200, 21600, 43200, 86400)
"""The ends of a linear axis of seconds."""


def line_chart(
    chart_id: str,
    lines: Mapping[str, Sequence[float | None]],
    axis: Axis,
    *,
    labels: Sequence[str],
    gaps: Sequence[bool],
    title: str,
    description: str,
    ticks: Sequence[str],
) -> Markup:
    """Return lines in steps, a step for each period. A value of None is left out, and a gap is marked.

    :param lines: the values of each period by the name of the series; two series at most.
    :param labels: when each period was, for the tooltips.
    :param gaps: for each period whether nothing is known of it.
    """
    places = len(labels)
    drawn = Markup("").join(
        html(
            '<g class="chart-bar"><title>{}</title>{}</g>',
            f"{label}: {GAP if gaps[place] else _values_text(lines, place, axis)}",
            _place(place, places, _LINES, is_gap=gaps[place]),
        )
        for place, label in enumerate(labels)
    )
    paths = Markup("").join(
        html('<path class="chart-steps chart-steps--{}" d="{}"/>', number_of_line, _steps(values, axis))
        for number_of_line, values in enumerate(lines.values(), start=1)
    )
    marks = [(_TOP + _y(value, axis), text) for value, text in axis.ticks]
    return Markup(
        '<figure class="chart" id="{id}"><div class="chart-row">'
        '<svg class="chart-bars" width="100%" height="{height}" role="img" aria-labelledby="{id}-title {id}-desc">'
        '<title id="{id}-title">{title}</title><desc id="{id}-desc">{description}</desc>{marks}'
        '<svg class="chart-plot" y="{top}" width="100%" height="{plot}">{drawn}</svg>'
        '<svg class="chart-plot" y="{top}" width="100%" height="{plot}" viewBox="0 0 1000 {plot}" '
        'preserveAspectRatio="none" aria-hidden="true">{paths}</svg>'
        '<line class="chart-base" x1="0" x2="100%" y1="{base}" y2="{base}"/>{ticks}</svg>'
        '<svg class="chart-scale" width="44" height="{height}" aria-hidden="true">{scale}</svg></div></figure>'
    ).format(
        id=chart_id,
        height=_TOP + _LINES + 22,
        top=_TOP,
        plot=_LINES,
        base=_pixels(_TOP + _LINES - 0.5),
        title=title,
        description=description,
        marks=Markup("").join(
            html('<line class="chart-line" x1="0" x2="100%" y1="{0}" y2="{0}"/>', _pixels(y)) for y, _ in marks
        ),
        drawn=drawn,
        paths=paths,
        ticks=_ticks(ticks, _TOP + _LINES + 16),
        scale=Markup("").join(html('<text x="100%" y="{}">{}</text>', _pixels(y + 4), text) for y, text in marks),
    )


def _values_text(lines: Mapping[str, Sequence[float | None]], place: int, axis: Axis) -> str:
    known = ((name, values[place]) for name, values in lines.items())
    return ", ".join(f"{name} {axis.text(value)}" for name, value in known if value is not None) or "none"


def _steps(values: Sequence[float | None], axis: Axis) -> str:
    """Return the path of a line: a horizontal step for each value, and a new beginning after each that is missing."""
    width, path, before = 1000 / max(len(values), 1), list[str](), False
    for place, value in enumerate(values):
        if value is not None:
            y = _pixels(_y(value, axis))
            path.append(f"V{y}" if before else f"M{_pixels(place * width)} {y}")
            path.append(f"H{_pixels((place + 1) * width)}")
        before = value is not None
    return "".join(path)


def _y(value: float, axis: Axis) -> float:
    # A line at the border must not be cut.
    return 1 + (_LINES - 2) * (1 - axis.height_of(value))


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


# -- the history of a queue --------------------------------------------------------------------------------------------


def _oldest_due(point: Point) -> float | None:
    """Return the age of the oldest due job; 0 if none was due, None if that is not known."""
    is_known = point.oldest_due is not None or point.due != 0
    return point.oldest_due if is_known else 0.0


def _failed_percent(point: Point) -> float | None:
    return None if point.failure_rate is None else 100 * point.failure_rate


_LOGARITHMIC = partial(Axis.of_durations, logarithmic=True)
_HISTORY: Sequence[tuple[str, Callable[[list[float]], Axis], Mapping[str, Callable[[Point], float | None]]]] = (
    ("Depth", Axis.of_counts, {"due": lambda each: each.due, "pending": lambda each: each.pending}),
    ("Oldest due", partial(Axis.of_durations, logarithmic=False), {"age": _oldest_due}),
    ("Failure rate", Axis.of_shares, {"failed": _failed_percent}),
    (
        "Wait",
        _LOGARITHMIC,
        {
            "p50": lambda each: None if each.waits is None else each.waits.p50,
            "p95": lambda each: None if each.waits is None else each.waits.p95,
        },
    ),
    (
        "Run",
        _LOGARITHMIC,
        {
            "p50": lambda each: None if each.runs is None else each.runs.p50,
            "p95": lambda each: None if each.runs is None else each.runs.p95,
        },
    ),
)
"""The charts of the history of a queue: title, axis and series."""


@dataclass(frozen=True, kw_only=True)
class HistoryCharts:
    charts: Sequence[tuple[str, Sequence[str], Markup]]
    """Title, names of the series, and the chart."""
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    """The same numbers as a table: each known period, the latest first, with its values."""


def history_charts(history: History) -> HistoryCharts:
    labels = [clock_text(each, with_date=history.step >= LONG_PERIOD) for each in history.begins]
    gaps = [point is None for point in history.points]
    charts: list[tuple[str, Sequence[str], Markup]] = []
    heads: list[str] = []
    columns: list[list[str]] = []
    for title, make_axis, series in _HISTORY:
        lines = {
            name: [None if point is None else value_of(point) for point in history.points]
            for name, value_of in series.items()
        }
        axis = make_axis([value for values in lines.values() for value in _known(values)])
        highest = {name: max(_known(values)) for name, values in lines.items() if _known(values)}
        ends = [f"{name} up to {axis.text(value)}" for name, value in highest.items()]
        drawn = line_chart(
            f"{title.lower().replace(' ', '-')}-history",
            lines,
            axis,
            labels=labels,
            gaps=gaps,
            title=f"{title}, one step for each {duration(history.step)}",
            description=f"Within {duration(history.span.length)}: {', '.join(ends) or 'none'}.",
            ticks=[*(f"{duration(history.span.length * share)} ago" for share in (1, 0.5)), "now"],
        )
        charts.append((title, [*lines], drawn))
        heads += [title if len(lines) == 1 else f"{title} {name}" for name in lines]
        columns += [["\u2013" if value is None else axis.text(value) for value in values] for values in lines.values()]
    rows = [
        (label, values)
        for label, is_gap, values in zip(labels, gaps, zip(*columns, strict=True), strict=True)
        if not is_gap
    ]
    return HistoryCharts(charts=charts, heads=heads, rows=rows[::-1])


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# -- parts -------------------------------------------------------------------------------------------------------------


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
        '<g class="chart-bar{}"><title>{}</title>{}{}</g>',
        Markup(" chart-bar--partial") if bar.is_partial else "",
        f"{bar.label}: {GAP if bar.is_gap else counted or 'none'}",
        _place(place, places, _PLOT, is_gap=bar.is_gap),
        Markup("").join(drawn),
    )


def _place(place: int, places: int, height: int, *, is_gap: bool) -> Markup:
    """Return the whole place of a period, which is lit up under the pointer."""
    slot = 100 / places
    return html(
        '<rect class="chart-place{}" x="{}%" y="0" width="{}%" height="{}"/>',
        Markup(" chart-place--gap") if is_gap else "",
        _percent(place * slot),
        _percent(slot),
        height,
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
