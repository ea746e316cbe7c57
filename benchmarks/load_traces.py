"""Loading speed: a Kineto file into a Program with dependencies, against HTA and against plain gunzip + orjson, in one run.

Bars: at least 3x HTA, at least 0.7 of gunzip + orjson. Each reader takes the best of several rounds, rounds interleaved.
"""

from __future__ import annotations

import gzip
import logging
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from hta.common.trace import parse_trace_file

from _cases import large_kineto_files
from steptime._program.load import load

ROUNDS = 5


def plain(path: Path) -> None:
    """The floor: the text parsed into Python objects, nothing made of it."""
    orjson.loads(gzip.decompress(path.read_bytes()))


def hta(path: Path) -> None:
    """HolisticTraceAnalysis: its data frame."""
    parse_trace_file(str(path))


def ours(path: Path) -> None:
    """steptime: a Program with dependencies."""
    load([path])


def best_seconds(path: Path, readers: tuple[Callable[[Path], None], ...]) -> list[float | None]:
    """The best of several interleaved rounds per reader; None where a reader fails on the file."""
    best: list[float | None] = [float("inf")] * len(readers)
    for _ in range(ROUNDS):
        for index, reader in enumerate(readers):
            before = best[index]
            if before is None:
                continue
            started = time.perf_counter()
            try:
                reader(path)
            except Exception as error:
                logging.getLogger(__name__).info("%s: %s", path, error)
                best[index] = None
                continue
            best[index] = min(before, time.perf_counter() - started)
    return best


def main() -> None:
    """Print one line per file."""
    logging.disable(logging.ERROR)
    print(f"{'file':44} {'MB':>6} {'steptime':>9} {'orjson':>9} {'HTA':>9}   ratio to orjson, to HTA (MB/s of JSON text)")
    ratios = []
    for path in large_kineto_files():
        size = len(gzip.decompress(path.read_bytes())) / 1e6
        mine, floor, rival = best_seconds(path, (ours, plain, hta))
        if mine is None or floor is None:
            raise SystemExit(f"{path}: not readable")
        against = f"{rival / mine:5.1f}" if rival else "fails"
        speed = f"{size / rival:9.1f}" if rival else f"{'-':>9}"
        ratios.append((floor / mine, rival / mine if rival else None))
        print(
            f"{path.name[:44]:44} {size:6.1f} {size / mine:9.1f} {size / floor:9.1f} {speed}   {floor / mine:5.2f}  {against}"
        )
    beaten = [r for _, r in ratios if r is not None]
    print(
        f"worst ratio to gunzip + orjson {min(r for r, _ in ratios):.2f} (bar 0.70); worst to HTA {min(beaten):.1f} (bar 3.0)"
    )


if __name__ == "__main__":
    main()
