#!/bin/sh
# Measure the model of torchtitan_planned.py, plan two devices, train it there with torchtitan's trainer.
# In a checkout of torchtitan, where its tokenizer and data are.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cp "$here/torchtitan_planned.py" .

optpipe profile --model torchtitan_planned:layers --microbatch-size 64 --dtype fp32 --devices 2 \
    --samples "${SAMPLES:-60}"
optpipe compile --mem 1GB --microbatches 4 --time-limit "${LIMIT:-5}"
torchrun --nproc-per-node 2 -m torchtitan.train --module torchtitan_planned --config pipeline
