#!/usr/bin/env bash
# All that needs a GPU, in one command: the tests, then figures; with the torch that is there (nothing is installed). PYTHON chooses
# the interpreter; arguments go to gpu_check.py (--help). Without a GPU it runs at tiny sizes on the CPU and says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" scripts/gpu_check.py "$@"
