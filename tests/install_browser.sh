#!/bin/sh
# Install a browser for the tests of the report's page, unless there is one: Debian's where this is Debian and the user is
# root, else the one that playwright fetches into the environment. tests/browser.py finds both; where neither can be had,
# the tests say so. $1 is the environment's bin.
for name in chromium chromium-browser google-chrome chrome; do
    if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null && exit 0
fi
"$1/playwright" install chromium && exit 0
echo "no browser could be installed: the report's page is not tested" >&2
exit 1
