"""What is kept on disk: the journal and its snapshots, and blobs beside it."""
