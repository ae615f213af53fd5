#!/bin/sh
# A training loop of your own, two ranks on this machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
optpipe profile --devices 2 --layers 2 --hidden 64 --seq 64 --samples "${SAMPLES:-60}" -o small.json
optpipe compile small.json --mem 1GB --microbatches 4 --time-limit "${LIMIT:-10}" -o small-schedule.json
torchrun --nproc-per-node 2 "$here/own_loop.py" small-schedule.json --steps "${STEPS:-5}"
