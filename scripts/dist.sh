#!/usr/bin/env bash
# Builds wheels and source archives of both packages into dist/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
rm -rf dist
"$python" -m build --outdir dist . >/dev/null
"$python" -m build --outdir dist lab >/dev/null
ls -l dist
