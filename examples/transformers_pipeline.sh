#!/bin/sh
# Measure the model of transformers_pipeline.py, plan two devices, train it there, save it as transformers reads it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cp "$here/transformers_pipeline.py" .

optpipe profile --model transformers_pipeline:model --microbatch-size 2 --seq 32 --dtype fp32 --devices 2 \
    --samples "${SAMPLES:-60}"
optpipe compile --mem 1GB --microbatches 4 --time-limit "${LIMIT:-5}"
torchrun --nproc-per-node 2 transformers_pipeline.py
