"""Do with each library what people do with a trainer, and compare with one process; prints a table.

python -m benchmarks.idioms --out runs/idioms
python -m benchmarks.idioms --rows 1a 4 --libraries Lightning --ranks 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
from pathlib import Path

from benchmarks import prepare_environment
from benchmarks.idioms.libraries import BY_NAME, Library
from benchmarks.idioms.page import BEGIN, END, Cell, table
from benchmarks.idioms.ranks import prepare
from benchmarks.idioms.rows import ROWS
from benchmarks.idioms.verdict import judge


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.idioms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--libraries", nargs="+", choices=[*BY_NAME], default=[*BY_NAME])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2, 3), default=[1, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/idioms"), help="folder; resumes from its cells")
    parser.add_argument("--again", action="store_true", help="run also what the folder has")
    parser.add_argument("--page", type=Path, help="put the table into this page, too")
    args = parser.parse_args()
    chosen = [BY_NAME[name] for name in args.libraries if _is_here(BY_NAME[name])]
    prepare_environment()
    prepare(["torch", "torch.distributed", *(library.package for library in chosen)])
    file = args.out / "idioms.json"
    args.out.mkdir(parents=True, exist_ok=True)
    cells = {} if not file.exists() else json.loads(file.read_text())
    for row in args.rows:
        for library in chosen:
            key = f"{row} {library.name}"
            if key in cells and not args.again:
                continue
            cells[key] = run_cell(library, row, args.ranks, args.out.resolve())
            print(f"{key}: {cells[key]['tries']}", file=sys.stderr, flush=True)
            file.write_text(json.dumps(cells, indent=1))
    text = table({key: Cell(**cell) for key, cell in cells.items()})
    print(text)
    if args.page:
        before, _, rest = args.page.read_text().partition(BEGIN)
        args.page.write_text("".join([before, BEGIN, text, END, rest.partition(END)[2]]))
    return 0


def run_cell(library: Library, row: str, sizes: list[int], out: Path) -> dict[str, object]:
    """Try the ways in order until one is right; return all that were tried."""
    tries: list[tuple[str, str, str]] = []
    for number, way in enumerate(library.ways_of(row)):
        folder = out / "ranks" / f"{row} {library.module} {library.package} {number}"
        shutil.rmtree(folder, ignore_errors=True)
        verdict = judge(library, row, way, sizes, folder)
        tries.append((way, *verdict))
        if verdict.word == "right":
            break
    return {"tries": tries, "version": library.version, "date": datetime.date.today().isoformat()}


def _is_here(library: Library) -> bool:
    if not library.is_here:
        print(f"{library.name} is left out: {library.package} is not installed", file=sys.stderr)
    return library.is_here


if __name__ == "__main__":
    sys.exit(main())
