"""What a run costs before anything is measured: seconds and memory from architecture, GPU and lengths."""
