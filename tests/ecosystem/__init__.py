"""Rows of docs/ecosystem.md, and what they run."""

from __future__ import annotations

from tests.ecosystem import distributed, functional, libraries, optimizers, stances, training
from tests.ecosystem.case import Case

CASES: dict[str, Case] = {
    f"{case.section}: {case.feature}": case
    for module in (training, optimizers, functional, stances, distributed, libraries)
    for case in module.CASES
}
