#!/usr/bin/env bash
# Chromium and its driver, which tests/browser looks at pages with. Where they cannot be had, those tests are skipped and say why.
set -euo pipefail

have() {
    { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null && command -v chromedriver >/dev/null
}

without() {
    echo "browser: $1; the tests in tests/browser will be skipped" >&2
    exit 0
}

if have; then
    echo "browser: Chromium and its driver are here"
    exit 0
fi
command -v apt-get >/dev/null || without "no Chromium with its driver here, and no apt-get to install them with"
[ "$(id -u)" -eq 0 ] || without "no Chromium with its driver here; as root, apt-get install chromium chromium-driver would bring them"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || echo "browser: apt-get update failed; trying with the lists at hand" >&2
apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null || without "Chromium could not be installed"
have || without "Chromium was installed, but it or its driver is not on the path"
echo "browser: Chromium and its driver were installed"
