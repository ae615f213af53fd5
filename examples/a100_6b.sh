#!/bin/sh
# GPT 6.2B on 8 A100s: costs of arXiv:2401.10241, Table 9; device pairs behind one host link; 16 microbatches under 2.
set -eu
optpipe profile uniform --devices 8 --layers-per-device 4 \
    --forward-ms 29.935 --backward-input-ms 29.621 --backward-weight-ms 19.388 --p2p-ms 0.535 \
    --activation-gb 10 --residue-fraction 0.4324 --d2h-ms 27.63 --h2d-ms 27.63 \
    --shared-links pairs --duplex-slowdown 1/0.7 -o a100.json
optpipe compile a100.json --mem 20GB --microbatches 16 --time-limit "${LIMIT:-60}" -o a100-schedule.json
optpipe verify a100-schedule.json --profile a100.json
