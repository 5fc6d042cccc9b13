#!/usr/bin/env bash
# An environment of the agents' tests: scripts/install_agents.sh VENV AGENTS_VENV EXTRA. It sees the
# packages of VENV, which come after its own. `agents` and `verifiers` want other versions of openai.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 agents=$2 extra=$3

"$venv/bin/python" -m venv --clear "$agents"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
echo "import site; site.addsitedir('$("$venv/bin/python" -c "$packages")')" \
    >"$("$agents/bin/python" -c "$packages")/venv.pth"
extras='import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])'
# shellcheck disable=SC2046
scripts/install.sh "$agents" "$venv/bin/python" $("$venv/bin/python" -c "$extras" "$extra")
