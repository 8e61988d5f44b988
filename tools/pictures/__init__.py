"""Programs that draw the pictures of the pages in docs/: `python -m tools.pictures.concepts`."""
