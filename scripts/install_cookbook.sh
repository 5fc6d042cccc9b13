#!/usr/bin/env bash
# tinker-cookbook for the tests of `hybridrl serve`: scripts/install_cookbook.sh VENV TINKER_VENV.
# Without its dependencies, of which tml-renderers (for models that are not served here) has no wheel
# for Python 3.11; then those that its recipes import.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 tinker=$2

scripts/install.sh "$tinker" "$venv/bin/python" --no-deps tinker-cookbook
scripts/install.sh "$tinker" "$venv/bin/python" blobfile chz pyrage termcolor tiktoken
