"""Pages: one HTML file each, that works offline."""
