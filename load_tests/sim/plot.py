"""A bar chart as SVG, written by hand: two kilobytes, no dependency, the same bytes for the same figures."""

import math
from collections.abc import Sequence
from html import escape

LEFT, BAR, GAP, WIDTH = 130, 14, 6, 640
TICKS = (10, 100, 1_000, 10_000, 100_000)


def bars(title: str, rows: Sequence[tuple[str, float, float]], highlight: str) -> str:
    """`rows`: name, p50, p95. The bar ends at p95 on a logarithmic axis; a mark stands at p50."""
    top = max(2 * TICKS[0], *(p95 for _, _, p95 in rows))
    span = WIDTH - LEFT - 70

    def x(value: float) -> float:
        return LEFT + span * math.log10(max(value, TICKS[0]) / TICKS[0]) / math.log10(top / TICKS[0])

    height = 40 + len(rows) * (BAR + GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18" font-size="13">{escape(title)}</text>',
    ]
    for tick in TICKS:
        if tick <= top:
            parts.append(
                f'<path d="M{x(tick):.0f} 30V{height - 18}" stroke="#ddd"/>'
                f'<text x="{x(tick):.0f}" y="{height - 5}" text-anchor="middle">{tick:,}</text>'
            )
    for i, (name, p50, p95) in enumerate(rows):
        y = 34 + i * (BAR + GAP)
        colour = "#c2410c" if name == highlight else "#94a3b8"
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{max(1.0, x(p95) - LEFT):.1f}" height="{BAR}" fill="{colour}"/>'
            f'<path d="M{x(p50):.1f} {y}v{BAR}" stroke="black" stroke-width="2"/>'
            f'<text x="{x(p95) + 4:.0f}" y="{y + 11}">{p50:,.0f} / {p95:,.0f}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
