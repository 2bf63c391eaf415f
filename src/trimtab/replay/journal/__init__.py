"""A controller's journal, replayed, and other policies in its world."""
