#!/usr/bin/env bash
# Sets up an environment (see venv.sh) and runs every check. With arguments, pytest runs once, with them.
#
# Three things run beside each other: tests whose ranks are processes, which wait for one another a lot; at low priority,
# so that those are not slowed down, tests that need no other process; and ruff, mypy and the import contracts. What runs
# in the background is printed when what is in front has ended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

use_venv test
checks() {
    echo "== ruff"
    ruff check || return
    echo "== mypy"
    mypy || return
    echo "== import contracts"
    lint-imports
}
if (($#)); then
    checks
    echo "== pytest"
    exec python -m pytest -q "$@"
fi

guards="not sweep and not nightly"
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT
in_background() { # NAME COMMAND...: at low priority, with its output in a file
    local name=$1
    shift
    (nice -n 10 "$@") >"$logs/$name" 2>&1 &
}
status=0
in_background one-process python -m pytest -v -n 2 --dist worksteal --durations 15 -m "$guards and not rank_processes"
one_process=$!
export -f checks
in_background checks bash -c checks
checked=$!
echo "== pytest: tests on ranks that are processes"
python -m pytest -v --durations 15 -m "$guards and rank_processes" || status=$?
echo "== pytest: tests in one process, on 2 workers"
tail -n +1 --pid=$one_process -f "$logs/one-process"
wait $one_process || status=$?
wait $checked || status=$?
cat "$logs/checks"
exit "$status"
