#!/usr/bin/env bash
# Builds wheels and source archives of both packages into dist/, wheels from the archives: `scripts/dist.sh [PYTHON]`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
rm -rf dist
for project in . lab; do
    "$python" -m build --outdir dist "$project" >/dev/null
done
(cd dist && sha256sum -- *.whl *.tar.gz >SHA256SUMS && cat SHA256SUMS)
