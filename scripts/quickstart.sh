#!/usr/bin/env bash
# From nothing to a comparison: installs, trains softmax and Scalable-Softmax on the same tokens, writes a report.
# Arguments are configuration overrides for both runs, e.g. scripts/quickstart.sh trainer.max_steps=500
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
runs=runs/quickstart
for normalizer in softmax ssmax; do
    say "training $normalizer: lm train configs/$normalizer.yaml runs=$runs $*"
    lm train "configs/$normalizer.yaml" "runs=$runs" resume=auto "$@"
done
say "report: lm report $runs/softmax $runs/ssmax --out $runs/report"
lm report "$runs/softmax" "$runs/ssmax" --out "$runs/report"
