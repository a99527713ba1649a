"""Groups of bars as SVG, written by hand: some ten kilobytes, no dependency, the same bytes for the same figures."""

import math
from collections.abc import Mapping, Sequence
from html import escape

LEFT, BAR, GAP, WIDTH, COLUMNS = 108, 11, 3, 460, 2
TICKS = (100, 1_000, 10_000, 100_000)


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float, float]]], highlight: str) -> str:
    """A panel per group; `groups`: name -> (name, p50, p95) each.

    A bar ends at p95 on a logarithmic axis, a mark stands at p50."""
    top = max([2 * TICKS[0], *(p95 for rows in groups.values() for _, _, p95 in rows)])
    tallest = max((len(rows) for rows in groups.values()), default=0)
    panel = 42 + tallest * (BAR + GAP)
    height = 28 + panel * -(-len(groups) // COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * COLUMNS}" height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18" font-size="13">{escape(title)}</text>',
    ]
    for i, (name, rows) in enumerate(groups.items()):
        parts.append(f'<g transform="translate({WIDTH * (i % COLUMNS)} {28 + panel * (i // COLUMNS)})">')
        parts += _panel(name, rows, highlight, top)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, rows: Sequence[tuple[str, float, float]], highlight: str, top: float) -> list[str]:
    span = WIDTH - LEFT - 90
    low = TICKS[0] / 2

    def x(value: float) -> float:
        return LEFT + span * math.log10(max(value, low) / low) / math.log10(top / low)

    bottom = 18 + len(rows) * (BAR + GAP)
    parts = [f'<text x="{LEFT}" y="12" font-weight="bold">{escape(title)}</text>']
    for tick in TICKS:
        if tick <= top:
            parts.append(
                f'<path d="M{x(tick):.0f} 16V{bottom}" stroke="#ddd"/><text x="{x(tick):.0f}" y="{bottom + 11}" text-anchor="middle">{tick:,}</text>'
            )
    for i, (name, p50, p95) in enumerate(rows):
        y = 18 + i * (BAR + GAP)
        colour = "#c2410c" if name == highlight else "#94a3b8"
        parts.append(
            f'<text x="{LEFT - 5}" y="{y + 9}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{max(1.0, x(p95) - LEFT):.0f}" height="{BAR}" fill="{colour}"/>'
            f'<path d="M{x(p50):.0f} {y}v{BAR}" stroke="black" stroke-width="2"/>'
            f'<text x="{x(p95) + 4:.0f}" y="{y + 9}">{p50:,.0f} / {p95:,.0f}</text>'
        )
    return parts
