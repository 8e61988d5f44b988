"""Reports on compiled code: its graphs and collectives, the work of the passes, and the predicted cost.

report = shardcompile.explain(model, x)     # compiles and runs once
print(report)

with shardcompile.capture() as report:      # around code that compiles
    train_step(batch)
"""

from shardcompile.inspect.capture import STAGES, capture
from shardcompile.inspect.data import (
    Compilation,
    GraphReport,
    IssuedCollective,
    PassStep,
    Span,
    TracedCollective,
)
from shardcompile.inspect.explain import explain
from shardcompile.inspect.report import Report

__all__ = [
    "STAGES",
    "Compilation",
    "GraphReport",
    "IssuedCollective",
    "PassStep",
    "Report",
    "Span",
    "TracedCollective",
    "capture",
    "explain",
]
