#!/usr/bin/env bash
# Sets up an environment (see venv.sh) and runs every check. With arguments, pytest runs once, with them.
#
# The tests run in two parts: most on two workers, since ranks that are processes wait a lot; then those that measure
# how soon ranks are told of a failure, with nothing beside them but ruff, mypy and the import contracts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
source scripts/checks.sh

use_venv test

# Inductor links hundreds of small libraries with torch's large ones. With the linker gold, a call of the compiler took
# 0.7 to 0.9 s instead of 1.2 s.
use_fast_linker() {
    [[ -z ${CXX:-} ]] && echo "int main() {}" | g++ -fuse-ld=gold -x c++ -o /dev/null - 2>/dev/null || return 0
    local compiler
    compiler=$(python -c "import sys; print(sys.prefix)")/cxx/g++
    mkdir -p "$(dirname "$compiler")"
    printf '#!/bin/sh\nexec g++ -fuse-ld=gold "$@"\n' >"$compiler"
    chmod +x "$compiler"
    export CXX=$compiler
}
use_fast_linker

if (($#)); then
    checks
    echo "== pytest"
    exec python -m pytest -q "$@"
fi

guards="not sweep and not nightly and not zoo"
status=0
echo "== pytest: on 2 workers"
python -m pytest -v -n 2 --dist worksteal --durations 15 -m "$guards and not alone" || status=$?
checked=$(mktemp)
checks >"$checked" 2>&1 &
echo "== pytest: tests that run alone"
mapfile -t alone < <(grep -rl --include "*.py" "mark\.alone" tests)
python -m pytest -v --durations 15 -m "$guards and alone" "${alone[@]}" || status=$?
wait $! || status=$?
cat "$checked"
rm "$checked"
exit "$status"
