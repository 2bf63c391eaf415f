"""Command output as text, and as data for `--format json` and `yaml`."""
