#!/usr/bin/env bash
# The environment of the loggers' tests: scripts/install_loggers.sh VENV LOGGERS_VENV. It sees the
# packages of VENV, which come after its own, so that it holds but what the three libraries add.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 loggers=$2

"$venv/bin/python" -m venv --clear "$loggers"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
echo "import site; site.addsitedir('$("$venv/bin/python" -c "$packages")')" \
    >"$("$loggers/bin/python" -c "$packages")/venv.pth"
extras='import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["wandb"], *extras["mlflow"], *extras["trackio"])'
# shellcheck disable=SC2046
scripts/install.sh "$loggers" "$venv/bin/python" $("$venv/bin/python" -c "$extras")
