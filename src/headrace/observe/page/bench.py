"""The result of `headrace bench` as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Mapping

from headrace.observe.page.charts import CONFIG, with_defaults
from headrace.observe.page.render import environment, library, script_json
from headrace.records import Json

_AGREEMENT = {"embed": "least cosine", "classify": "same labels", "generate": "same texts"}


def render_comparison(found: Mapping[str, Json]) -> str:
    """The page.

    Args:
        found: an `app.bench.BenchResult` as JSON.

    Raises:
        MissingExtraError: a library is missing.
    """
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
            found=found,
            agreement=_AGREEMENT[found["task"]],
            spec=script_json(_chart(found)),
            config=script_json(CONFIG),
            library=library(),
            written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        )
    )


def _chart(found: Mapping[str, Json]) -> dict[str, Json]:
    values = [
        {
            "name": f"{row['contender']}, {row['setting']}",
            "rate": row["records_per_s"],
            "low": min(row["rounds"]),
            "high": max(row["rounds"]),
            "ours": row["contender"] == "headrace",
        }
        for row in found["rows"]
        if row["records_per_s"] is not None
    ]
    y = {"field": "name", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 320, "ticks": False}}
    colour = {"condition": {"test": "datum.ours", "value": "var(--real)"}, "value": "var(--padding)"}
    return with_defaults(
        {
            "data": {"values": values},
            "height": {"step": 26},
            "encoding": {"y": y},
            "layer": [
                {
                    "mark": {"type": "bar", "height": 16},
                    "encoding": {
                        "x": {"field": "rate", "type": "quantitative", "title": "records/s"},
                        "color": colour,
                        "tooltip": [{"field": "name"}, {"field": "rate", "format": ",.1f"}],
                    },
                },
                {
                    "mark": {"type": "rule", "color": "var(--text)"},
                    "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
                },
            ],
        }
    )
