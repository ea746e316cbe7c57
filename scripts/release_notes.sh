#!/usr/bin/env bash
# What the changelog says of a release: `scripts/release_notes.sh v0.2.0`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?a tag such as v0.2.0}
version=${version#v}
notes=$(awk -v title="## [$version]" 'index($0, "## [") == 1 { on = index($0, title) == 1; next } /^\[.*\]: / { on = 0 } on' CHANGELOG.md)
if [ -z "$(tr -d '[:space:]' <<<"$notes")" ]; then
    echo "CHANGELOG.md has no section [$version]; move what is under [Unreleased] there, with the date" >&2
    exit 1
fi
printf '%s\n' "$notes"
