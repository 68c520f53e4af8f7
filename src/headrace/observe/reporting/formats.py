"""Numbers as a page shows them."""

from __future__ import annotations


def number(value: float | None, digits: int = 0) -> str:
    """With separators of thousands; "-" for none, two digits of what would be 0."""
    if value is None:
        return "-"
    if value and abs(value) < 10**-digits:
        return f"{value:.2g}"
    return f"{value:,.{digits}f}"


def money(value: float | None) -> str:
    """An amount, with three digits below 1, so that small parts can be compared."""
    if value is None:
        return "-"
    if 0 < value < 0.0001:
        return "< 0.0001"
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.3g}"


def seconds(value: float) -> str:
    """In seconds, minutes or hours."""
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    return f"{value / 60:,.1f} min" if value >= 300 else f"{value:,.2f} s"


def percent(value: float) -> str:
    """A fraction."""
    return f"{100 * value:.1f} %"
