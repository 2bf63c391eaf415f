"""OpenRLHF: configuration and logs."""
