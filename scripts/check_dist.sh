#!/usr/bin/env bash
# Tries what `make dist` built as a user would, outside the clone: `scripts/check_dist.sh [PYTHON ...]`, by default python3.
# Each interpreter gets an empty environment with the wheels alone, in which configs are predicted, tables are sharded, a page is
# written and the lab answers. CONSTRAINTS names a file of versions; by default the newest that are allowed are installed.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dist=$repository/dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$repository/examples/configs" "$repository/examples/sharding" "$repository/examples/prefetch_sync" "$work/"
cd "$work"
for python in "${@:-python3}"; do
    environment=$work/$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
    "$python" -m venv "$environment"
    pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
    [ -z "${CONSTRAINTS:-}" ] || pip+=(-c "$CONSTRAINTS")
    "${pip[@]}" "$dist"/steptime-*.whl
    run() { env -u PYTHONPATH "$environment/bin/steptime" "$@" >"$work/out.txt" || { cat "$work/out.txt"; exit 1; }; }
    run --version
    [ "$(cat out.txt)" = "steptime $(basename "$dist"/steptime-*.whl | cut -d- -f2)" ]
    run predict configs/llama-8b.toml --platform 8xh200-nvlink --html page.html
    grep -q "<html" page.html
    run predict configs/dlrm_small.toml --platform 2xh200-nvlink --json
    run shard sharding/task.toml --platform 4xh200-quarter-loopback --torchrec plan.json
    run sweep configs/gpt2-ddp.toml --platform 8xh100-nvlink --batch 64,128
    run replay prefetch_sync
    run platforms
    run --show-completion bash
    if "$environment/bin/steptime" validate >out.txt 2>&1 || ! grep -q "is part of the lab" out.txt; then
        echo "without the lab, validate does not say how to get it:" && cat out.txt && exit 1
    fi
    "${pip[@]}" "$dist"/steptime_lab-*.whl
    run validate collectives
    echo "$("$environment/bin/python" --version): installs and works from wheels alone"
done
