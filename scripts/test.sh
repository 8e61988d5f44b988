#!/usr/bin/env bash
# Sets up an environment (see venv.sh) and runs every check. With arguments, pytest runs once, with them.
#
# The tests run in two parts: those that need no other process side by side, then those whose ranks are processes, which
# take all cores by themselves. ruff, mypy and the import contracts are checked beside the second part, whose ranks wait a
# lot. (Both parts at once take as long as one after the other: there is no more to be had from two cores.)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

use_venv test
checks() {
    echo "== ruff"
    ruff check && ruff format --check --quiet || return
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
echo "== pytest: tests in one process, on 2 workers"
status=0
python -m pytest -v -n 2 --dist worksteal --durations 15 -m "$guards and not rank_processes" || status=$?
checked=$(mktemp)
checks >"$checked" 2>&1 &
echo "== pytest: tests on ranks that are processes"
python -m pytest -v --durations 15 -m "$guards and rank_processes" || status=$?
wait $! || status=$?
cat "$checked"
rm "$checked"
exit "$status"
