"""Points in a plane as a small SVG, each with its name; equal numbers give equal bytes."""

from typing import NamedTuple
from xml.sax.saxutils import escape

_COLOURS = ("#d9480f", "#1971c2", "#2f9e44")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 620, 360, 60, 36, 40  # pixels


class Point(NamedTuple):
    label: str
    x: float
    y: float
    series: int = 0


def draw(title: str, points: list[Point]) -> str:
    """Draw the points; both axes start at 0."""
    most_x = 1.15 * max((point.x for point in points), default=1.0)
    most_y = 1.1 * max((point.y for point in points), default=1.0)
    bottom = _HEIGHT - _BOTTOM
    parts = [_text(8, 18, title, 13)]
    for i in range(6):
        x, y = _LEFT + i * (_WIDTH - _LEFT) / 5, bottom - i * (bottom - _TOP) / 5
        parts += [_text(x - 8, bottom + 16, f"{most_x * i / 5:.0f}"), _text(8, y + 4, f"{most_y * i / 5:.0f}")]
    for point in points:
        x = _LEFT + point.x / most_x * (_WIDTH - _LEFT)
        y = bottom - point.y / most_y * (bottom - _TOP)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[point.series % len(_COLOURS)]}"/>')
        parts.append(_text(x + 6, y + 4, point.label))
    axes = f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH}" stroke="#adb5bd" fill="none"/>'
    style = '<style>text{font-family:sans-serif;fill:#495057}</style><rect width="100%" height="100%" fill="#fff"/>'
    size = f'viewBox="0 0 {_WIDTH + 90} {_HEIGHT}" width="{_WIDTH + 90}" height="{_HEIGHT}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, axes, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'
