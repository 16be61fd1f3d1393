#!/usr/bin/env bash
# From nothing to verdicts: installs, compares normalizers on text and on recall, writes one report. Stopped, it goes on where it was.
# Arguments are configuration overrides for all runs, e.g. scripts/quickstart.sh trainer.max_steps=200, or options of lm compare.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "comparing: text, then recall; final seeds are dropped where they would take longer than 12 minutes"
experiments=configs/experiments
lm compare $experiments/quickstart-text.yaml $experiments/quickstart-recall.yaml --jobs 2 --minutes 12 --out runs/quickstart/report "$@"
