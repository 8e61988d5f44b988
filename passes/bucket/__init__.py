"""Passes that choose the real collectives: many merged into one, or torch's own in place of ours."""
