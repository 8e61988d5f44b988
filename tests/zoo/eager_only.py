"""Models that are compared in eager mode alone, or not by our backend, and why."""

from __future__ import annotations

_SKIPPED = "the model imports a module while it runs, which Dynamo does not trace"

EAGER_ONLY = {
    "hf-mamba": "its scan takes 96 collectives; the comparison did not end within four minutes on a busy machine",
    "hf-wav2vec2": "the model sets requires_grad of an activation, which Dynamo cannot trace",
    "hf-segformer": "the model enters a lock, which Dynamo cannot trace",
    "no-fno": _SKIPPED,
    "no-tfno": _SKIPPED,
    "no-uno": _SKIPPED,
}
"""By name, the reason."""

NOT_BY_OUR_BACKEND = {
    "pn-pangu": "Inductor's code generation did not end within four minutes on a busy machine",
}
"""Of those that are compared by `aot_eager`, by name."""
