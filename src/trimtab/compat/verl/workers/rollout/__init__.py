"""Part of an import path of verl."""
