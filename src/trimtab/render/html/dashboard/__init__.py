"""The dashboard's page."""
