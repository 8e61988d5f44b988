"""SVG pictures of the pages: readable in the light and in the dark scheme, and narrow enough for a telephone.

Colours are CSS variables. A file has values for both schemes of the system, for readers of the repository; on the site,
`scripts/site_hooks.py` puts pictures into the page without them, and `docs/figures.css` follows the site's own switch.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

_STYLE = """<style>
.figure{--ink:#1c1f23;--quiet:#5c646e;--line:#c4c8cc;--soft:#eef0f2;--compute:#c9d1da;--busy:#6f93bd;--comm:#f0b26b;--wait:#f6d9d0;--bad:#dd7f78;
--rank0:#8fb8e8;--rank1:#f3b577;--rank2:#8fcf9f;--rank3:#d7a6dc}
@media (prefers-color-scheme:dark){.figure{--ink:#e4e7ea;--quiet:#9aa4af;--line:#4a515a;--soft:#262b30;
--compute:#4a5562;--busy:#4f78a8;--comm:#b0701f;--wait:#5a2f24;--bad:#a8453e;--rank0:#2f69ab;--rank1:#94561a;--rank2:#2b7a45;--rank3:#8a4a92}}
</style>"""

WIDTH = 344
"""The width of a panel. Two of them fit side by side on a wide screen, one fits a telephone."""

CHARACTER = 6.7
"""The width of a character of code at the size that `Panel.text` uses."""


class Panel:
    """A picture that is at most as wide as a telephone.

    Args:
        height: in pixels.
        width: in pixels.
    """

    def __init__(self, height: float, width: float = WIDTH) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = "none", dash: str = "", rounded: int = 2
    ) -> None:
        """Adds a rectangle; colours are names of variables."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{_short(x)}" y="{_short(y)}" width="{_short(w)}" height="{_short(h)}" rx="{rounded}"'
            f' fill="{_colour(fill)}" stroke="{_colour(line)}"{dashed}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        code: bool = False,
        anchor: str = "start",
        size: int = 12,
    ) -> None:
        """Adds a line of text, whose middle is at `y`."""
        family = "var(--md-code-font,ui-monospace),monospace" if code else "inherit"
        size = 11 if code else size
        self._parts.append(
            f'<text x="{_short(x)}" y="{_short(y + 4)}" font-size="{size}" font-family="{family}"'
            f' text-anchor="{anchor}" fill="{_colour(colour)}">{html.escape(text, quote=False)}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = "quiet", width: float = 1.2, dash: str = ""
    ) -> None:
        """Adds a line through points."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        through = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{through}" fill="none" stroke="{_colour(colour)}" stroke-width="{width}"{dashed}/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]], colour: str = "quiet") -> None:
        """Adds a line through points whose last, horizontal or vertical part ends in a head."""
        self.line(points, colour)
        (x0, y0), (x, y) = points[-2:]
        dx, dy = ((x > x0) - (x < x0), 0) if abs(x - x0) > abs(y - y0) else (0, (y > y0) - (y < y0))
        corners = ((x, y), (x - 6 * dx + 4 * dy, y - 6 * dy + 4 * dx), (x - 6 * dx - 4 * dy, y - 6 * dy - 4 * dx))
        through = " ".join(f"{_short(a)},{_short(b)}" for a, b in corners)
        self._parts.append(f'<polygon points="{through}" fill="{_colour(colour)}"/>')

    def box(
        self, x: float, y: float, w: float, h: float, lines: Sequence[str], fill: str = "soft", code: bool = False
    ) -> None:
        """Adds a box with centred lines of text."""
        self.rect(x, y, w, h, fill, "line")
        for i, line in enumerate(lines):
            self.text(
                x + w / 2, y + h / 2 + 15 * (i - (len(lines) - 1) / 2), line, code=code and not i, anchor="middle"
            )

    def __str__(self) -> str:
        w, h = _short(self.width), _short(self.height)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {w} {h}" width="{w}" height="{h}"'
        return "\n".join([head + ' font-family="system-ui,sans-serif">', _STYLE, *self._parts, "</svg>", ""])


def write(panels: dict[str, Panel], folder: Path = DOCS) -> None:
    """Writes each panel to the file `NAME.svg`."""
    for name, panel in panels.items():
        (folder / f"{name}.svg").write_text(str(panel))
        print(f"{name}.svg: {len(str(panel))} B")


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _colour(name: str) -> str:
    return name if name == "none" else f"var(--{name})"
