# Sourced by the other scripts: makes .venv beside this folder if it is absent or out of date, and enters it.
# PYTHON chooses the interpreter (3.11 or later); LM_CONSTRAINTS another constraints file, or none (LM_CONSTRAINTS=).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

python=${PYTHON:-python3}
constraints=${LM_CONSTRAINTS-constraints.txt}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or later is needed, $python is $("$python" -V 2>&1); set PYTHON=..." >&2
    exit 1
}
wanted=$(cat pyproject.toml ${constraints:+"$constraints"} | cksum)
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    say "installing into .venv (about a minute)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install -qq --disable-pip-version-check ${constraints:+-c "$constraints"} -e '.[corpora,dev]'
    printf '%s' "$wanted" > .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
