"""Parts of pages: page frame, charts, timelines, curves, labels."""
