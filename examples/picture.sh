#!/bin/sh
# The picture in the README: four devices, two stages each, two microbatches of memory.
set -eu
optpipe profile uniform --devices 4 --layers-per-device 2 --activation-gb 10 --d2h-ms 1.05 --h2d-ms 1.05 \
    --shared-links pairs --duplex-slowdown 1/0.7 -o four.json
optpipe compile four.json --mem 20GB --microbatches 8 --placement loop --stages-per-device 2 \
    --time-limit "${LIMIT:-30}" -o four-schedule.json
optpipe report four-schedule.json --profile four.json -o report.html
browser=$(command -v chromium || command -v google-chrome || true)
if [ -n "$browser" ]; then # as root a browser starts only without its sandbox; the page is our own
    "$browser" --headless=new --no-sandbox --hide-scrollbars --window-size=1600,900 --virtual-time-budget=2000 \
        --screenshot=report.png "file://$PWD/report.html#forward:7:5" 2>/dev/null
fi
