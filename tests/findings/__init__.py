"""What fell short when the library was first tried from outside, line by line, to be played again.

``python -m tools.findings_table [A1 ...]`` plays them and prints what each gives today. Groups: A values and data, B
ranks that wait, C compilation, E the ecosystem.
"""

from __future__ import annotations

from tests.findings import compilation, ecosystem, values, waiting
from tests.findings.line import LINES

__all__ = ["LINES", "compilation", "ecosystem", "values", "waiting"]
