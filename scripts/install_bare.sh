#!/usr/bin/env bash
# The environment of `make test-bare`: scripts/install_bare.sh BARE_VENV PYTHON. It has torch,
# transformers and pytest, and nothing else of hybridrl's dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."
bare=$1 python=$2
export CONSTRAINTS=scripts/constraints-bare.txt
pip_install() { scripts/install.sh "$bare" "$python" "$@"; }

rm -rf "$bare" # libraries of another torch
pip_install --no-deps torch nvidia-cuda-runtime nvidia-cuda-cupti
# What torch needs besides the libraries of its GPU build.
pip_install filelock typing-extensions "setuptools<82" sympy networkx jinja2 fsspec transformers pytest

# PyPI's torch is the GPU build, which does not load without CUDA's libraries: 2.5 GB that no CPU
# calls. Empty libraries take their places; their functions are looked up when they are called.
packages=$("$bare/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
folder=$packages/nvidia/cu13/lib
for name in $(LC_ALL=C readelf -d "$packages"/torch/lib/*.so |
    sed -n 's/.*NEEDED.*\[\(lib\(cu\|nccl\|nv\)[^]]*\)\]/\1/p' | sort -u); do
    [ -e "$folder/$name" ] || gcc -shared -x c /dev/null -Wl,-soname,"$name" -o "$folder/$name"
done
echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' >"$packages/lazy.pth"
