#!/usr/bin/env bash
# A headless Chromium for the tests that look at the report page (Debian and Ubuntu, as root).
set -euo pipefail
command -v chromium >/dev/null || command -v google-chrome >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q && apt-get install -y -q --no-install-recommends chromium
else
    echo "no Chromium found: the report's browser tests will be skipped (install one to run them)" >&2
fi
