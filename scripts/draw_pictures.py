"""Draws the pictures of docs/start/concepts.md: `python -m scripts.draw_pictures`; `--check` only compares."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images"
INK, PALE, BLUE, RED, GREEN, GREY = "#1f2937", "#f3f4f6", "#4c72b0", "#c44e52", "#55a868", "#d1d5db"


class Picture:
    """An SVG that grows by boxes, texts and arrows; readable on light and dark pages, as it has a ground of its own."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
            f'  role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">',
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="white"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PALE) -> None:
        """A box with lines of text in its middle; white on strong colours."""
        ink = "white" if fill in (BLUE, RED, GREEN) else INK
        line = GREY if fill in (PALE, GREY, "white") else fill
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{line}"/>'
        )
        lines = text.split("\n")
        for number, each in enumerate(lines):
            at = y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, at, each, anchor="middle", ink=ink)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", ink: str = INK, bold: bool = False) -> None:
        """A line of text."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, text: str = "") -> None:
        """An arrow, with a text over its middle."""
        self._parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{INK}" stroke-width="1.3" '
            'marker-end="url(#tip)"/>'
        )
        if text:
            self.text((x + to_x) / 2, (y + to_y) / 2 - 5, text, anchor="middle")

    def __str__(self) -> str:
        return "\n".join((*self._parts, "</svg>")) + "\n"


def waiting() -> Picture:
    """Why ranks wait, and what balancing changes."""
    picture = Picture(760, 330, "Four ranks, three steps: every rank waits for the slowest one, unless loads are even")
    loads = ((9, 4, 5), (3, 10, 4), (4, 3, 8), (4, 5, 3))
    for top, title, even in ((18, "As loaded", False), (178, "Balanced", True)):
        picture.text(16, top + 6, title, bold=True)
        for rank, row in enumerate(loads):
            at = 80.0
            picture.text(16, top + 34 + 28 * rank, f"rank {rank}")
            for step, load in enumerate(row):
                column = [each[step] for each in loads]
                longest = sum(column) / len(column) if even else max(column)
                width = 20 * (sum(column) / len(column) if even else load)
                picture.box(at, top + 18 + 28 * rank, width, 22, f"step {step}", BLUE)
                if longest * 20 - width > 1:
                    picture.box(at + width, top + 18 + 28 * rank, longest * 20 - width, 22, "", GREY)
                at += 20 * longest + 8
    picture.box(640, 178, 16, 14, "", GREY)
    picture.text(662, 190, "waits")
    return picture


def one_round() -> Picture:
    """A round beside training."""
    picture = Picture(860, 330, "While earlier batches train, the lead decides about batch 7")
    for y, name in ((40, "training"), (120, "lead (rank 0)"), (200, "balancer"), (270, "moving")):
        picture.text(12, y + 22, name, bold=True)
    for number, x in ((5, 120), (6, 350), (7, 600)):
        picture.box(x, 40, 220 if number < 7 else 230, 34, f"forward and backward of batch {number}", BLUE)
    picture.box(120, 120, 120, 34, "gathers costs")
    picture.box(220, 200, 160, 34, "plans, or is late")
    picture.box(400, 120, 180, 34, "takes the plan, or plans", GREEN)
    picture.box(480, 270, 112, 34, "All2All", GREEN)
    picture.arrow(150, 74, 150, 120)
    picture.arrow(210, 154, 240, 200)
    picture.arrow(370, 200, 420, 154)
    picture.arrow(530, 154, 530, 270)
    picture.arrow(592, 270, 620, 74)
    picture.text(125, 108, "batch 7", anchor="end")
    picture.text(632, 140, "each rank is told")
    picture.text(632, 158, "what to send and get")
    picture.text(120, 24, "time →")
    return picture


def keys() -> Picture:
    """From a key to its row."""
    picture = Picture(800, 190, "A key's owner follows from the key alone")
    for x, text in (
        (16, "keys of a batch\n17  4  90  17"),
        (216, "bucketize\nby owner(key)"),
        (416, "All2All of keys"),
        (616, "the owner's table\nlooks rows up"),
    ):
        picture.box(x, 30, 160, 56, text, BLUE if text.startswith("bucketize") else PALE)
    for x in (176, 376, 576):
        picture.arrow(x, 58, x + 40, 58)
    picture.box(216, 118, 360, 46, "rows in the order of the batch, by All2All back")
    picture.arrow(696, 86, 578, 138)
    picture.arrow(216, 141, 98, 88)
    return picture


PICTURES = {"waiting": waiting, "round": one_round, "keys": keys}


def main(arguments: list[str]) -> int:
    """Writes the pictures, or tells which are not as this file draws them."""
    status = 0
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", str(draw())
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} differs from what python -m scripts.draw_pictures writes", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
