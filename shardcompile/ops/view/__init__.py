"""Views, slices, joins, padding."""
