"""Files in and out: job files, the dialects of training frameworks, logs, profiles."""
