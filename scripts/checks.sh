# Sourced by scripts/test.sh, from the repository root.
#
# checks   runs ruff, mypy and the import contracts, and ends at the first that fails.

checks() {
    echo "== ruff"
    ruff check && ruff format --check --quiet || return
    check_types || return
    echo "== import contracts"
    lint-imports
}

# What mypy finds follows from torch's annotations, and these change from version to version. It counts with the version
# of CI; with others it is shown.
check_types() {
    local pinned installed
    pinned=$(sed -n 's/^torch==//p' .ci/constraints.txt)
    installed=$(python -c "import importlib.metadata; print(importlib.metadata.version('torch'))")
    if [[ ${installed%%+*} == "$pinned" ]]; then
        echo "== mypy"
        mypy
    else
        echo "== mypy: torch is $installed, types are checked with $pinned, so that nothing found here counts"
        mypy || true
    fi
}
