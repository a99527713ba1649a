"""Horizontal bars of shares as a small SVG, the same bytes for the same numbers."""

from typing import NamedTuple
from xml.sax.saxutils import escape

_COLOURS = ("#d9480f", "#1971c2", "#868e96", "#2f9e44", "#9c36b5", "#e8a33d")
_LABELS, _WIDTH, _BAR, _GAP, _TOP = 250, 420, 9, 8, 52  # pixels


class Group(NamedTuple):
    label: str
    shares: dict[str, float]  # share by series, 0 to 1


def draw(title: str, groups: list[Group]) -> str:
    """Draw the bars, with one colour per series, in the order in which the series first occur."""
    series = list(dict.fromkeys(name for group in groups for name in group.shares))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(series)}
    parts, y = [*_legend(title, colours)], _TOP
    for group in groups:
        height = _BAR * len(group.shares)
        parts.append(_text(_LABELS - 8, y + height / 2 + 4, group.label, "end"))
        for i, (name, share) in enumerate(group.shares.items()):
            width, at = min(share, 1.2) * _WIDTH, y + i * _BAR
            parts.append(
                f'<rect x="{_LABELS}" y="{at}" width="{width:.1f}" height="{_BAR - 1}" fill="{colours[name]}"/>'
            )
            parts.append(_text(_LABELS + width + 4, at + _BAR - 1, f"{share:.0%}", "start", 9))
        y += height + _GAP
    axis = f'<path d="M{_LABELS} {_TOP - 4}V{y}M{_LABELS + _WIDTH} {_TOP - 4}V{y}" stroke="#adb5bd" fill="none"/>'
    width = _LABELS + int(1.2 * _WIDTH) + 40
    style = '<style>text{font-family:sans-serif;fill:#495057}</style><rect width="100%" height="100%" fill="#fff"/>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 4}" width="{width}" height="{y + 4}">'
    return "\n".join([opening, style, axis, *parts, "</svg>\n"])


def _legend(title: str, colours: dict[str, str]) -> list[str]:
    parts, x = [_text(8, 18, title, "start", 13)], 8
    for name, colour in colours.items():
        parts += [f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>', _text(x + 14, 37, name, "start")]
        x += 30 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
