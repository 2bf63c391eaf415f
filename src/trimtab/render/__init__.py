"""Terminal text, HTML pages and live terminal displays."""
