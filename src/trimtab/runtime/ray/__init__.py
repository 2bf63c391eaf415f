"""What runs on Ray. Ray is imported when something is run, never when this is imported."""
