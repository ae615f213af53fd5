#!/bin/sh
# The whole job, with its defaults: measure, plan, check, train. Then the same model under a cap that hurts.
set -eu
optpipe profile --samples "${SAMPLES:-60}" ${SIZE:-}
optpipe compile --mem 40GB --time-limit "${LIMIT:-20}"
optpipe show
optpipe verify --profile profile.json
optpipe run schedule.json --check --steps "${STEPS:-10}"

echo
echo "The same model under ${TIGHT:-90MB} per device:"
optpipe compile --mem "${TIGHT:-90MB}" --time-limit "${LIMIT:-20}" -o tight.json
optpipe run tight.json --check --steps "${STEPS:-10}"
