"""Draw the packages of hvd_trainer and their imports, read from the source, as docs/architecture.svg.

python docs/architecture_graph.py writes the file; tests/unit/project/test_docs.py fails if it is out of
date. Only the standard library is used, and nothing of the package is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hvd_trainer"
DRAWING = ROOT / "docs/architecture.svg"
ROW, BOX, LEFT, TOP, WIDTH = 32, 160, 140, 44, 960
"""Height of a row, width of a box, left edge of the boxes, first row, width of the drawing, in pixels."""


def layers() -> dict[str, str]:
    """Return row -> description from the list "Layers" in CONTRIBUTING.md; a row may name several modules."""
    section = re.search(r"^## Layers\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    if section is None:
        raise SystemExit('CONTRIBUTING.md has no section "Layers"')
    return dict(re.findall(r"^    (\w+(?:, \w+)*)(?: {2,}|\n +)(\S.*)$", section[1], re.M))


def imports() -> dict[str, set[str]]:
    """Return row -> rows of what its modules import, inside functions too."""
    row_of = {name: row for row in layers() for name in row.split(", ")}
    found: dict[str, set[str]] = {row: set() for row in layers()}
    for path in PACKAGE.rglob("*.py"):
        row = row_of.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for node in ast.walk(ast.parse(path.read_text())) if row else ():
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            used = {row_of.get(name.split(".")[1], row) for name in names if name.startswith("hvd_trainer.")}
            found[row] |= used - {row}
    return found


def arrows() -> Iterator[tuple[str, str, str]]:
    """Yield (row, row that it imports, colour): blue is up, without what follows from others; red is down."""
    rows = list(layers())
    above = {row: {used for used in uses if rows.index(used) < rows.index(row)} for row, uses in imports().items()}

    def reach(row: str) -> set[str]:
        return above[row].union(*map(reach, above[row]))

    for row, uses in imports().items():
        for used in sorted(above[row].difference(*map(reach, above[row])), key=rows.index):
            yield row, used, "#3949ab"
        yield from ((row, used, "#c62828") for used in sorted(uses - above[row]))


def drawing() -> str:
    """Return the SVG: a row for each package; an arrow leads from a package up to one that it imports."""
    y_of = {row: TOP + ROW * number for number, row in enumerate(layers())}
    height = TOP + ROW * len(y_of)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>The packages of hvd_trainer and what they import</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="13" fill="#555555">'
        "An arrow leads to an imported package; those that follow from others are left out.</text>",
    ]
    for row, used, colour in arrows():
        start, end = y_of[row] + 9, y_of[used] + 17
        bend = LEFT - 20 - 18 * (abs(start - end) / ROW) ** 0.8
        if 0 < start - end < ROW:
            shape = f"M{LEFT + BOX // 2} {start - 9} V{end + 9}"
        else:
            shape = f"M{LEFT} {start} C{bend:.0f} {start} {bend:.0f} {end} {LEFT - 1} {end}"
        out.append(f'<path d="{shape}" fill="none" stroke="{colour}" marker-end="url(#head)"/>')
    for row, text in layers().items():
        y = y_of[row]
        size = 13 if len(row) < 20 else 11
        out += [
            f'<rect x="{LEFT}" y="{y}" width="{BOX}" height="26" rx="4" fill="#e8eaf6" stroke="#3949ab"/>',
            f'<text x="{LEFT + BOX // 2}" y="{y + 17}" font-size="{size}" text-anchor="middle" fill="#1a237e">'
            f"{row}</text>",
            f'<text x="{LEFT + BOX + 14}" y="{y + 17}" font-size="12" fill="#333333">{escape(text)}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    DRAWING.write_text(drawing())
    print(f"wrote {DRAWING.relative_to(ROOT)}")
