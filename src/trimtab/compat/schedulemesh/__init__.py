"""The import paths of ScheduleMesh: `simple` and `config.policy`; only the package's name differs."""
