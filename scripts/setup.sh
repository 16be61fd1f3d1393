# Sourced by the other scripts: makes .venv beside this folder if it is absent or out of date, and enters it.
# PYTHON chooses the interpreter (3.11 or later); LM_CONSTRAINTS another constraints file, or none (LM_CONSTRAINTS=). The variable extras
# says which extras of pyproject.toml are installed: a script that sources this one may set it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

python=${PYTHON:-python3}
constraints=${LM_CONSTRAINTS-constraints.txt}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or later is needed, $python is $("$python" -V 2>&1); set PYTHON=..." >&2
    exit 1
}
version='import sys; print(*sys.version_info[:2], sep=".")'
if [ -n "${PYTHON:-}" ] && [ -x .venv/bin/python ] && [ "$("$python" -c "$version")" != "$(.venv/bin/python -c "$version")" ]; then
    echo "error: .venv has Python $(.venv/bin/python -c "$version"), PYTHON=$PYTHON is $("$python" -c "$version"): rm -r .venv, or unset PYTHON" >&2
    exit 1
fi
extras=${extras:-corpora,dev}
wanted="$(cat pyproject.toml ${constraints:+"$constraints"} | cksum) $extras"
unset PYTHONDONTWRITEBYTECODE # what is imported is compiled once, and nothing else (--no-compile)
if [[ "$(cat .venv/installed 2>/dev/null)" != "$wanted"* ]]; then # corpora alone is there if corpora,dev is
    say "installing into .venv (about a minute)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip --version > /dev/null 2>&1 || .venv/bin/python -m ensurepip > /dev/null  # uv makes none, nor does a venv cut short
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile ${constraints:+-c "$constraints"} -e ".[$extras]"
    printf '%s' "$wanted" > .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
