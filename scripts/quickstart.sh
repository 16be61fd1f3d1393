#!/usr/bin/env bash
# From nothing to a first verdict: installs, and compares normalizers on recall. Stopped, it goes on where it was.
# Arguments are configuration overrides for all runs, e.g. scripts/quickstart.sh trainer.max_steps=200, or options of lm compare.
extras=corpora
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "comparing on recall: one to three minutes on two cores of its own"
lm compare configs/experiments/quickstart-recall.yaml --jobs 2 "$@"
say "next, on text, where three seeds leave open which is better (docs/quickstart.md):"
printf 'source .venv/bin/activate\nlm compare configs/experiments/quickstart-text.yaml --jobs 2\n'
