#!/usr/bin/env bash
# Makes docs/swapping.md's figures: softmax for 200 steps, then swapped in three variants and trained 100 steps more.
# Arguments are configuration overrides for every run, e.g. scripts/swapping.sh trainer.max_steps=20
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
runs=runs/swapping
common=("runs=$runs" optim.schedule=constant optim.lr=1e-3 eval.every=10 eval.long_context.length_factor=0 log.every=1)

say "softmax"
lm train configs/softmax.yaml name=base "${common[@]}" trainer.max_steps=200 resume=auto "$@"
for init in match unit fit; do
    say "swap: --init $init"
    [ -d "$runs/swapped-$init" ] || lm swap "$runs/base" --to ssmax --init "$init" -o "$runs/swapped-$init"
done
say "swap: affine"
[ -d "$runs/swapped-affine" ] || lm swap "$runs/base" --to ssmax -o "$runs/swapped-affine" model.normalizer.bias=true

# The continued runs read other sequences (seed=2) with fresh optimizer state, the softmax of the comparison too.
more=("${common[@]}" seed=2 trainer.max_steps=100 optim.warmup_steps=10 eval.long_context.length_factor=8 resume=auto)
say "going on: softmax"
lm train configs/softmax.yaml name=softmax "init_from=$runs/base" "${more[@]}" "$@"
for init in match unit fit; do
    say "going on: $init"
    lm train configs/ssmax.yaml "name=$init" "init_from=$runs/swapped-$init" "${more[@]}" "$@"
done
say "picture and report"
python scripts/swapping_picture.py "$runs" docs/swapping.png
lm report "$runs/softmax" "$runs/match" "$runs/unit" "$runs/fit" --out "$runs/report"
