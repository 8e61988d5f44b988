#!/usr/bin/env bash
# Sets up an environment (see venv.sh) and runs every check. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

use_venv test
echo "== ruff"
ruff check
echo "== mypy"
mypy
echo "== import contracts"
lint-imports
echo "== pytest"
python -m pytest -q "$@"
