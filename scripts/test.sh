#!/usr/bin/env bash
# Sets everything up and passes the tests. Arguments go to pytest, e.g. scripts/test.sh -m slow
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "style: ruff"
ruff check .
ruff format --check .
say "tests: pytest $*"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
exec python -m pytest -q --dist worksteal -n "$(python -c 'import os; print(min(8, os.cpu_count()))')" "$@"
