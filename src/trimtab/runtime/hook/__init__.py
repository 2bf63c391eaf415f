"""The HTTP hook: node maintenance and wanted workers, for callers outside."""
