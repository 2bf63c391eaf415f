"""State on disk: the journal with its snapshots, and blobs beside it."""
