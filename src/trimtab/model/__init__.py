"""The nouns of trimtab as frozen dataclasses, and its errors. Imports nothing else of trimtab."""
