#!/usr/bin/env bash
# Sets up an environment (see venv.sh) and runs what takes too long for every push: the marks `nightly`, `sweep` and
# `zoo`.
# Arguments go to pytest: `bash scripts/nightly.sh -k roll`. docs/development.md says how long each part takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

use_venv test
use_venv zoo || echo "== packages of the zoo are missing; tests of their models are skipped"
status=0
echo "== pytest: on 2 workers"
python -m pytest -q -n 2 --dist worksteal --durations 15 -m "(nightly or sweep or zoo) and not alone" "$@" || status=$?
echo "== pytest: tests that run alone"
python -m pytest -q --durations 15 -m "(nightly or sweep) and alone" "$@" || status=$?
exit "$status"
