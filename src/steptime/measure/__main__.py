"""`python -m steptime.measure JOB ...`, as it was called before the lab had a package of its own."""

import runpy
import sys

if __name__ == "__main__":
    print("steptime: warning: python -m steptime.measure is python -m steptime_lab.measure now", file=sys.stderr)
    runpy.run_module("steptime_lab.measure", run_name="__main__")
