"""Timelines as a picture: one row per measurement, one bar per span, in SVG.

Independent of the measurements: it gets names and times.
"""

from html import escape
from typing import NamedTuple

WIDTH, LEFT, ROW, BAR, TOP = 1180, 260, 46, 20, 40
_COLOURS = (  # one for each phase, so that no two bars of a picture have the same colour
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d", "#7f7f7f", "#1f3f7c", "#a05195",
    "#006d5b", "#c2185b", "#8c6d00", "#5e3c99", "#00a5cf", "#333333",
)  # fmt: skip


class Bar(NamedTuple):
    name: str
    began_ms: float
    ended_ms: float


class Row(NamedTuple):
    title: str
    total_ms: float
    bars: tuple[Bar, ...]


def svg(title: str, rows: list[Row]) -> str:
    """Draw each row on its own scale, given at its right end: clocks differ by a factor of a thousand."""
    names = list(dict.fromkeys(bar.name for row in rows for bar in row.bars))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    parts = [_text(10, 24, title, 16, "bold")]
    for number, row in enumerate(rows):
        parts += _row(row, TOP + number * ROW, colours)
    legend_at = TOP + len(rows) * ROW + 16
    per_line = 5
    for number, name in enumerate(names):
        x, y = 10 + (number % per_line) * 234, legend_at + (number // per_line) * 22
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colours[name]}"/>')
        parts.append(_text(x + 20, y + 12, name, 12))
    height = legend_at + (-(-len(names) // per_line)) * 22 + 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _row(row: Row, y: float, colours: dict[str, str]) -> list[str]:
    room = WIDTH - LEFT - 110
    scale = room / max(row.total_ms, 1e-9)
    parts = [_text(10, y + 15, row.title, 13)]
    for bar in sorted(
        row.bars, key=lambda bar: bar.began_ms - bar.ended_ms
    ):  # the longest first, so that spans inside it stay visible
        x, width = LEFT + bar.began_ms * scale, max(0.8, (bar.ended_ms - bar.began_ms) * scale)
        label = f"{bar.name}: {bar.ended_ms - bar.began_ms:.1f} ms, from {bar.began_ms:.1f} ms"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colours[bar.name]}"><title>{escape(label)}</title></rect>'
        )
        if width > 60:
            parts.append(_text(x + 4, y + 14, f"{bar.ended_ms - bar.began_ms:.0f}", 11, colour="white"))
    parts.append(f'<line x1="{LEFT}" y1="{y + BAR + 3}" x2="{LEFT + room}" y2="{y + BAR + 3}" stroke="#bbb"/>')
    parts.append(_text(LEFT + room + 8, y + 15, f"{row.total_ms:,.0f} ms", 13, "bold"))
    return parts


def _text(x: float, y: float, text: str, size: int, weight: str = "normal", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )
