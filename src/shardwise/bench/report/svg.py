"""Small pieces of SVG. Colours are CSS classes of the page, so that light and dark both work; every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 860


def text(x: float, y: float, words: str, *, css: str = "", anchor: str = "start") -> str:
    """A label; (x, y) is its baseline."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, css: str, title: str = "") -> str:
    """A bar; `title` shows on hover and is read aloud."""
    hover = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}" class="{css}">{hover}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, css: str = "axis") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def polyline(points: Sequence[tuple[float, float]], css: str, title: str = "") -> str:
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{where}" class="{css}"><title>{escape(title)}</title></polyline>'


def drawing(height: float, parts: Sequence[str], label: str) -> str:
    """A whole picture with a description for screen readers."""
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg {box} role="img" aria-label="{escape(label, quote=True)}" class="chart">{"".join(parts)}</svg>'


def milliseconds(seconds: float) -> str:
    """`0.42 ms`, `12 ms`, `1.4 s`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    value = seconds * 1e3
    return f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms" if value < 20 else f"{value:.0f} ms"


def ticks(top: float, num: int = 5) -> list[float]:
    """Round values from 0 to about `top`."""
    if top <= 0:
        return [0.0]
    step = 10 ** math.floor(math.log10(top / num))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(top / num - factor * step))
    return [index * step for index in range(int(top / step) + 1)]
