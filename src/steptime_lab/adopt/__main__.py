"""`python -m steptime_lab.adopt NAME -o DIR`: adopting where only torch, numpy and pyarrow are installed."""

from __future__ import annotations

import sys

from steptime._calibrate.harness.command import fail
from steptime.errors import SteptimeError
from steptime_lab.adopt.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SteptimeError as error:
        sys.exit(fail(error))
    except OSError as error:
        sys.exit(fail(f"{error.filename or 'output'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        sys.exit(130)
