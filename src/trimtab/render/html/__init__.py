"""HTML pages, one file each, that work offline."""
