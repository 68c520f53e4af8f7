"""The charts of the page, as Vega-Lite specifications. Colours are CSS variables, so that the page decides on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from headrace.observe.accounting.timeline import CAUSES, COMPUTING, LABELS, LANES, STAGE_LANES
from headrace.observe.reporting.job_figures import JobFigures, histogram, series
from headrace.observe.reporting.summary import RunSummary

Spec: TypeAlias = dict[str, object]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_BOXES = 120
"""Batches in one timeline: more would be too thin to see."""
_LANE_AXIS: Spec = {"scale": {"domain": list(LANES)}, "axis": {"title": None, "ticks": False}}
_CAUSE_COLOURS: Spec = {"domain": [LABELS[cause] for cause in CAUSES], "range": [f"var(--{cause})" for cause in CAUSES]}
_LANE_COLOURS: Spec = {"domain": list(LANES), "range": [f"var(--{cause})" for cause in LANES.values()]}
CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "gridColor": "var(--line)",
        "labelOverlap": True,
        "labelSeparation": 8,
    },
    "legend": {"labelColor": "var(--text)", "titleColor": "var(--muted)", "symbolType": "square"},
    "title": {"color": "var(--text)", "fontSize": 13, "fontWeight": 600, "anchor": "start"},
}
"""For all charts."""


def charts(runs: Sequence[RunSummary], found: JobFigures) -> dict[str, Spec]:
    """The charts of a job, by name; those without data are left out."""
    drawn: dict[str, Spec | None] = {
        "causes": _causes(found),
        "over-time": _over_time(runs),
        **_timelines(runs[-1]),
        "stages": _stage_activity(runs),
        "throughput": _line(runs, "records", "records/s", "var(--real)"),
        "tokens": _line(runs, "cost", "tokens/s", "var(--prepare)") if found.tokens else None,
        "memory": _memory(runs),
        "size": _bars(runs, "size", "records in a batch"),
        "cost": _bars(runs, "cost", "cost of a batch, padding included"),
    }
    return {name: with_defaults(spec) for name, spec in drawn.items() if spec is not None}


def with_defaults(spec: Spec) -> Spec:
    """The chart with what all charts have."""
    return {"$schema": _SCHEMA, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}, **spec}


def _causes(found: JobFigures) -> Spec | None:
    wall = found.wall_s
    if not wall:
        return None
    rows = [
        {"cause": LABELS[cause], "seconds": _short(seconds), "share": _short(seconds / wall), "order": order}
        for order, cause in enumerate(CAUSES)
        if (seconds := found.causes.get(cause, 0.0)) > 0
    ]
    return {
        "height": 42,
        "data": {"values": rows},
        "mark": {"type": "bar", "height": 34},
        "encoding": {
            "x": {
                "field": "share",
                "type": "quantitative",
                "stack": "zero",
                "scale": {"domain": [0, 1], "nice": False, "clamp": True},
                "axis": {"format": "%", "title": None, "grid": False},
            },
            "color": _colour("cause", _CAUSE_COLOURS),
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": _tips(("cause", "cause"), ("share", "share", ".1%"), ("seconds", "seconds", ",.2f")),
        },
    }


def _over_time(runs: Sequence[RunSummary]) -> Spec | None:
    width, bins = series(runs)
    if not bins:
        return None
    rows = []
    for place, sums in enumerate(bins):
        covered, below, start = sum(sums.get(cause, 0.0) for cause in CAUSES), 0.0, place * width
        for cause in CAUSES:
            share = sums.get(cause, 0.0) / covered if covered else 0.0
            if share > 0:
                box = {"from": start, "to": start + width, "below": below, "above": below + share, "share": share}
                rows.append({"cause": LABELS[cause], **{name: _short(value) for name, value in box.items()}})
                below += share
    return _boxes(
        190, rows, len(bins) * width, y=_shares("below"), y2={"field": "above"},
        color=_colour("cause", _CAUSE_COLOURS),
        tooltip=_tips(("from", "from second", ",.2f"), ("cause", "cause"), ("share", "share", ".1%")),
    )  # fmt: skip


def _boxes(height: int, rows: list[Spec], seconds: float, **encoding: object) -> Spec:
    """Boxes from one second to another."""
    return {
        "height": height,
        "data": {"values": rows},
        "mark": {"type": "rect", "strokeWidth": 0},
        "encoding": {"x": _x("from", "seconds", 0, _short(seconds)), "x2": {"field": "to"}, **encoding},
    }


def _timelines(run: RunSummary) -> dict[str, Spec | None]:
    """The first batches and the last ones of the newest run, with what the host did at the same time."""
    batches = sorted(run.account.batches)
    if not batches:
        return {}
    if len(batches) <= 2 * _BOXES:
        start = min([batches[0][0], *(chunk[1] for chunk in run.account.chunks)])
        return {"timeline": _timeline(run, start, run.account.wall_s)}
    first, last = batches[:_BOXES], batches[-_BOXES:]
    return {
        "timeline": _timeline(run, first[0][0] - first[0][1], first[-1][0] + first[-1][1]),
        "timeline-end": _timeline(run, last[0][0], run.account.wall_s),
    }


def _timeline(run: RunSummary, start: float, end: float) -> Spec:
    start = max(start, 0.0)
    rows = []
    for begun, duration, size, cost, padded, failed, reason in run.account.batches:
        if begun <= end and begun + duration >= start:
            padding = 1 - cost / padded if padded else 0.0
            rows.append(
                {**_box("device", begun, duration, start, end), "size": size, "cost": _short(cost), "failed": failed,
                 "padding": _short(max(padding, 0.0)), "closed by": reason or "unknown"}
            )  # fmt: skip
    for stage, begun, duration, records in run.account.chunks:
        if begun <= end and begun + duration >= start:
            rows.append({**_box(STAGE_LANES[stage], begun, duration, start, end), "size": records})
    return {
        "height": 170,
        "data": {"values": rows},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "rect", "stroke": "var(--panel)", "strokeWidth": 0.6, "clip": True},
        "encoding": {
            "x": _x("from", "seconds", start, end),
            "x2": {"field": "to"},
            "y": {"field": "lane", "type": "nominal", **_LANE_AXIS},
            "color": _colour("lane", _LANE_COLOURS),
            "tooltip": _tips(
                ("lane",),
                ("from", "from second", ",.3f"),
                ("took", "seconds", ",.3f"),
                ("size", "records", ",d"),
                ("cost", "", ",.0f"),
                ("padding", "", ".1%"),
                ("failed", "failed records", ",d"),
                ("closed by",),
            ),
        },
    }


def _box(lane: str, begun: float, duration: float, start: float, end: float) -> Spec:
    """A box of a lane, cut to the time that is drawn and wide enough to be seen."""
    least = (end - start) / 900
    stop = min(max(begun + duration, begun + least), max(end, begun + least))
    return {"lane": lane, "from": round(max(begun, start), 5), "to": round(stop, 5), "took": _short(duration)}


def _stage_activity(runs: Sequence[RunSummary]) -> Spec | None:
    """How many workers of each stage were at work, over the whole time."""
    width, bins = series(runs)
    rows = []
    for place, sums in enumerate(bins):
        busy = sum(sums.get(cause, 0.0) for cause in COMPUTING)
        work = {"device": busy, **{lane: sums.get(f"stage {stage}", 0.0) for stage, lane in STAGE_LANES.items()}}
        start = _short(place * width)
        rows += [
            {"from": start, "to": _short(start + width), "lane": lane, "busy": _short(seconds / width)}
            for lane, seconds in work.items()
            if seconds > 0
        ]
    if not rows:
        return None
    dark = {"domain": [0, 1], "range": [0.06, 1], "clamp": True}
    return _boxes(
        150, rows, len(bins) * width, y={"field": "lane", "type": "nominal", **_LANE_AXIS},
        color=_colour("lane", _LANE_COLOURS),
        opacity={"field": "busy", "type": "quantitative", "scale": dark, "legend": None},
        tooltip=_tips(("lane",), ("from", "from second", ",.2f"), ("busy", "at work on average", ".2f")),
    )  # fmt: skip


def _line(runs: Sequence[RunSummary], name: str, title: str, colour: str) -> Spec | None:
    width, bins = series(runs)
    rows = [{"at": _short((place + 0.5) * width), "rate": _short(sums.get(name, 0.0) / width)}
            for place, sums in enumerate(bins)]  # fmt: skip
    if not any(row["rate"] for row in rows):
        return None
    return _area(rows, "rate", title, colour, len(bins) * width, ",.1f")


def _memory(runs: Sequence[RunSummary]) -> Spec | None:
    width, bins = series(runs)
    unit = 1e9 if max((sums.get("max memory", 0.0) for sums in bins), default=0.0) >= 1e9 else 1e6
    rows = [{"at": _short((place + 0.5) * width), "memory": _short(sums["max memory"] / unit)}
            for place, sums in enumerate(bins) if sums.get("max memory")]  # fmt: skip
    if len(rows) < 2:
        return None
    return _area(rows, "memory", "GB" if unit == 1e9 else "MB", "var(--write)", len(bins) * width, ",.2f")


def _area(rows: Sequence[Mapping[str, float]], name: str, title: str, colour: str, end: float, form: str) -> Spec:
    return {
        "height": 130,
        "data": {"values": list(rows)},
        "mark": {"type": "area", "interpolate": "step", "color": colour, "fillOpacity": 0.35,
                 "line": {"color": colour, "strokeWidth": 1.4}},
        "encoding": {
            "x": _x("at", "seconds", 0, _short(end)),
            "y": {"field": name, "type": "quantitative", "axis": {"title": title, "tickCount": 4, "format": "~s"}},
            "tooltip": _tips(("at", "second", ",.2f"), (name, title, form)),
        },
    }  # fmt: skip


def _bars(runs: Sequence[RunSummary], name: str, title: str) -> Spec | None:
    buckets = histogram(runs, name)
    if not buckets:
        return None
    zero = min((lower for lower, *_ in buckets if lower > 0), default=1.0) / 2
    rows = [{"from": _short(max(lower, zero)), "to": _short(max(upper, zero * 1.09)), "batches": count}
            for lower, upper, count, _ in buckets]  # fmt: skip
    return {
        "height": 130,
        "data": {"values": rows},
        "mark": {"type": "rect", "color": "var(--real)", "stroke": "var(--panel)", "strokeWidth": 0.5},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "scale": {"type": "log", "nice": False},
                "axis": {"title": title, "format": "~s", "tickCount": 5, "grid": False},
            },
            "x2": {"field": "to"},
            "y": {"field": "batches", "type": "quantitative", "axis": {"title": "batches", "tickCount": 4}},
            "y2": {"datum": 0},
            "tooltip": _tips(("from", "", ",.4~g"), ("to", "", ",.4~g"), ("batches", "", ",d")),
        },
    }


def _tips(*each: tuple[str, ...]) -> list[Spec]:
    """What a box says of itself: for each figure its field, its title, which may be left out, and its format."""
    names = ("field", "title", "format")
    return [{name: part for name, part in zip(names, one, strict=False) if part} for one in each]


def _colour(field: str, colours: Spec) -> Spec:
    return {"field": field, "type": "nominal", "scale": colours, "legend": None}


def _shares(field: str) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"domain": [0, 1], "clamp": True},
        "axis": {"format": "%", "title": None},
    }


def _x(field: str, title: str, start: float, end: float) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"domain": [start, end], "nice": False},
        "axis": {"title": title, "grid": False},
    }


def _short(number: float) -> float:
    """Enough digits for a picture: a page of many numbers stays small."""
    return float(f"{number:.6g}")
