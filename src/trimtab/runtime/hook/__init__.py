"""HTTP hook: node drains and the number of wanted workers, for external callers."""
