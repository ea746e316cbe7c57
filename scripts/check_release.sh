#!/usr/bin/env bash
# Whether a tag may be released: `scripts/check_release.sh v0.2.0`. It is the package's version, and the changelog has a section for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tag=${1:?a tag such as v0.2.0}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/steptime/__init__.py)
if [ "$tag" != "v$version" ]; then
    echo "tag $tag is not v$version, the version in src/steptime/__init__.py; change one of them" >&2
    exit 1
fi
scripts/release_notes.sh "$tag" >/dev/null
