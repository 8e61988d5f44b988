# Sourced by the scripts beside it, from the repository root.
#
# use_venv EXTRA   puts an environment with `shardcompile[EXTRA]`, installed editable, on PATH. The environment is
#                  the folder .venv, or the one that SHARDCOMPILE_VENV names; it is made where there is none. What
#                  is installed already stays until pyproject.toml, setup.py or a constraints file changes.
#
# Python keeps its bytecode, whatever the caller's setting: without it every process compiles the sources of torch
# again, 8 of the 12 seconds that an import took, and the ranks, the demo and many tests are processes of their own.

use_venv() {
    unset PYTHONDONTWRITEBYTECODE
    local extra=$1
    local venv=${SHARDCOMPILE_VENV:-.venv}
    [[ $venv == /* ]] || venv=$PWD/$venv
    local stamp=$venv/.installed-$extra key
    # PIP_CONSTRAINT is a list for pip too, so it is split at spaces on purpose.
    # shellcheck disable=SC2086
    key=$({ pwd; cat pyproject.toml setup.py ${PIP_CONSTRAINT:-}; } | cksum)

    if [[ ! -x $venv/bin/python || ! -f $stamp || $(<"$stamp") != "$key" ]]; then
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            echo "== making the environment $venv"
            python3 -m venv "$venv"
        fi
        echo "== installing shardcompile[$extra] into $venv (minutes, the first time)"
        rm -f "$stamp"
        # Most modules of torch are never imported: Python compiles those that are, when they are first.
        "$venv/bin/python" -m pip install --quiet --no-compile --editable ".[$extra]"
        echo "$key" >"$stamp"
    else
        echo "== the environment $venv is up to date"
    fi
    export PATH=$venv/bin:$PATH
}
