#!/usr/bin/env bash
# A page as a picture, by Chromium: scripts/screenshot.sh PAGE.html PICTURE.png [WIDTH] [HEIGHT]
# docs/report-page.png is the quickstart's at 1000 526, in fewer colours: of runs/quickstart-recall/report/report.html
set -euo pipefail
chromium --headless --no-sandbox --hide-scrollbars --virtual-time-budget=2000 --window-size="${3:-1000},${4:-900}" \
    --screenshot="$(realpath "$2")" "file://$(realpath "$1")" 2>/dev/null
