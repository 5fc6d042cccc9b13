#!/usr/bin/env bash
# The first quarter hour on a GPU: scripts/gpu_first_run.sh [--device auto|cpu|cuda] [--help] [OUT]
#
# In ten minutes: the report (scripts/gpu_report.py), three steps of the demo, and three steps of a
# model of 1.3B parameters with 512 new tokens. It needs torch, triton, transformers, and hydra-core
# with omegaconf: installed, or as the wheels that `make gpu-first-run-wheels` puts into .whl beside
# the tree. Nothing is downloaded. Files arrive in OUT (default $OUT, or .cache/gpu_first_run/out)
# while it runs, seven small ones at most. docs/gpu.md says what they hold.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
device=auto folders=()
wrong() { # wrong WHAT WANTED
    echo "$1: wanted $2" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        --device) # without a value it is wrong below
            device=${2:-}
            shift
            ;;
        --device=*) device=${1#*=} ;;
        -*) wrong "$1" "--device auto|cpu|cuda, --help, or a directory" ;;
        *) folders+=("$1") ;;
    esac
    shift || true
done
case $device in
    auto | cpu | cuda) ;;
    *) wrong "--device=$device" "auto, cpu or cuda" ;;
esac
[ ${#folders[@]} -le 1 ] || wrong "${folders[*]}" "at most one directory"
work=${FIRST_RUN_WORK:-$root/.cache/gpu_first_run}
out=${folders[0]:-${OUT:-$work/out}}
python=${PYTHON:-python3}
companion=$root/scripts/gpu_first_run.py

# hybridrl as if it were installed: from links, since its parts are side by side in the tree.
rm -rf "$work/site"
mkdir -p "$work/site/hybridrl"
ln -sfn "$root"/hybridrl/* "$root"/{conf,recipes,kernels} "$work/site/hybridrl/"
for wheel in "$root"/.whl/*.whl; do
    [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$work/site"
done
# Before the report, which takes most of the time: what the trainings need beside it.
for module in hydra omegaconf antlr4; do
    PYTHONPATH=$work/site "$python" -c "import $module" 2>/dev/null ||
        wrong "$python" "one with $module; first, with a network: make gpu-first-run-wheels"
done
rm -rf "$work/runs" "$work/parts"
mkdir -p "$work/runs" "$work/parts" "$out"
out=$(cd "$out" && pwd)

# What is measured so far, every few seconds: whoever ends this script early has it, too.
keep() { "$python" "$companion" keep "$work" "$out" || true; }
(while sleep 5; do keep; done) >/dev/null 2>&1 &
keeper=$!
child=
trap 'kill $keeper $child 2>/dev/null || true; keep' EXIT
trap 'exit 143' INT TERM

# part NAME SECONDS COMMAND...: its output, exit code and seconds are files of their own.
failed=0
part() {
    local name=$1 limit=$2 code=0 begun=$SECONDS
    shift 2
    echo "$name: at most $limit s"
    timeout --kill-after=5 "$limit" "$@" >"$work/parts/$name.log" 2>&1 </dev/null &
    child=$!
    wait $child || code=$? # a signal ends the wait at once
    child=
    echo "$code $((SECONDS - begun))" >"$work/parts/$name.ended"
    [ "$code" = 0 ] || failed=1
    local outcome=done
    [ "$code" = 0 ] || outcome=$(tail -n 1 "$work/parts/$name.log")
    echo "$name: $outcome ($((SECONDS - begun)) s)"
}

# Limits of the three parts, with 5 s each to end: 590 s, and 10 s for the rest. The report ends by
# itself before: 25 s are for its imports.
part report 385 "$python" "$root/scripts/gpu_report.py" --device "$device" --minutes 6 \
    --out "$work/report" --scratch "$work/report"
if [ "$(cut -d ' ' -f 1 "$work/parts/report.ended")" = 2 ]; then # wrong input, or no torch
    exit 2
fi
[ ! -f "$work/report/report.json" ] || # it may have been cut off before its first figure
    device=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["device"])' \
        "$work/report/report.json")

export PYTHONPATH=$work/site PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 # the working directory may be the tree
"$python" "$companion" words "$work/words.jsonl"
run() { # run NAME SECONDS OVERRIDES...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m hybridrl.cli train experiment=spell_tiny cluster=processes \
        "cluster.device=$device" "run.dir=$work/runs/$name" trainer.steps=3 trainer.save_every=0 \
        'telemetry.loggers=[]' data=jsonl "data.sources.main.name=$work/words.jsonl" \
        data.eval_size=64 data.max_prompt_tokens=16 "$@"
}
# Rewards of a model that has learned little must differ: the share of its characters that differ.
varied=(reward=function "reward.function=$companion:varied")
run demo 90 warm_start.steps=20 "${varied[@]}"
large=(hidden_size=1536 intermediate_size=8960 num_layers=28 num_heads=12 num_kv_heads=2 head_dim=128
    max_positions=2048)
tokens=512
if [ "$device" = cpu ]; then # the same steps, in a size for two cores
    large=(hidden_size=64 intermediate_size=128 num_layers=2 num_heads=2 num_kv_heads=1 head_dim=32
        max_positions=256)
    tokens=48
fi
run large 100 warm_start.steps=0 "rollout.max_new_tokens=$tokens" "${varied[@]}" \
    "${large[@]/#/model.tiny.}"
exit $failed
