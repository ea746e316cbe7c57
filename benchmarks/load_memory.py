"""Peak memory while loading a trace of at least 200 MB, above the import baseline, over the uncompressed size. Bar: 3.

The trace is made by repetition: the events of a real one over and over, times and ids moved on each time.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson

from _cases import large_kineto_files

TARGET_BYTES = 210_000_000

# VmHWM, not ru_maxrss: the latter is inherited from the process that starts this one.
_CHILD = """
import re, sys
from pathlib import Path
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))
{imports}
base = peak()
{action}
print(base, peak())
"""
_READERS = {
    "steptime": (
        "from steptime._program.load import load; import steptime._program.formats as f; f.formats()",
        "program = load([sys.argv[1]])",
    ),
    "gunzip + orjson": ("import gzip, orjson", "document = orjson.loads(gzip.open(sys.argv[1]).read())"),
}


def repeated(source: Path, target: Path) -> int:
    """Write the source's events again and again, moved on; the uncompressed size."""
    document = orjson.loads(gzip.decompress(source.read_bytes()))
    events = document.pop("traceEvents")
    spans = [e for e in events if e.get("ph") == "X" and isinstance(e.get("ts"), int | float)]
    length = max(e["ts"] + e.get("dur", 0) for e in spans) - min(e["ts"] for e in spans) + 1000
    written = 0
    with gzip.open(target, "wb", compresslevel=1) as out:
        written += out.write(orjson.dumps(document)[:-1] + b',"traceEvents":[')
        round_number = 0
        while written < TARGET_BYTES:
            for event in events:
                moved = _moved(event, round_number, length)
                written += out.write(
                    (b"," if written > TARGET_BYTES or round_number or event is not events[0] else b"") + orjson.dumps(moved)
                )
            round_number += 1
        written += out.write(b"]}")
    return written


def _moved(event: dict[str, object], number: int, length: float) -> dict[str, object]:
    moved = dict(event)
    if isinstance(moved.get("ts"), int | float):
        moved["ts"] = moved["ts"] + number * length  # type: ignore[operator]
    name = moved.get("name")
    if isinstance(name, str) and name.startswith("ProfilerStep#"):
        moved["name"] = f"ProfilerStep#{int(name.split('#')[1]) + 1000 * number}"
    args = moved.get("args")
    if isinstance(args, dict):
        shifted = {
            k: v + number * 10_000_000 for k, v in args.items() if k in ("correlation", "External id") and isinstance(v, int)
        }
        moved["args"] = {**args, **shifted}
    return moved


def main() -> None:
    """Print peak memory per reader."""
    source = max(large_kineto_files(), key=lambda p: p.stat().st_size)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "large_rank0.json.gz"
        size = repeated(source, target)
        print(f"{source.name} repeated to {size / 1e6:.0f} MB of JSON")
        for name, (imports, action) in _READERS.items():
            code = _CHILD.format(imports=imports, action=action)
            done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True)
            base, peak = (int(v) * 1024 for v in done.stdout.split())
            bar = " (bar 3.0)" if name == "steptime" else ""
            print(f"{name:16} {(peak - base) / 1e6:7.0f} MB above import = {(peak - base) / size:.2f} x the file{bar}")


if __name__ == "__main__":
    main()
