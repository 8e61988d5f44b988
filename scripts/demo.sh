#!/usr/bin/env bash
# Sets up an environment (see venv.sh) and runs the demo. Arguments go to the demo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

use_venv demo
echo "== demo"
python -m examples.poisson "$@"
