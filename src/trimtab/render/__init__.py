"""What a user sees: text, pages, and live displays in a terminal."""
