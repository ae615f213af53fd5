#!/bin/sh
# The whole job, with its defaults: measure, plan, check, train. Then the same model under a cap that hurts.
set -eu
optpipe profile
optpipe compile --mem 40GB --time-limit 20
optpipe show
optpipe verify --profile profile.json
optpipe run schedule.json --check

echo
echo "The same under 90 MB per device, where no published schedule may fit:"
optpipe compile --mem 90MB --time-limit 20 -o tight.json
optpipe run tight.json --check --steps 5
