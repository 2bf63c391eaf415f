"""The dashboard: page, panels, timeline and their source."""
