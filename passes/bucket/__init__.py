"""Which real collectives there are: many in one, or torch's own in place of ours."""
