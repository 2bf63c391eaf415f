"""The nouns of trimtab as frozen dataclasses. Imports only `trimtab.core`."""
