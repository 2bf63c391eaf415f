"""A client's session with the controller, and its tasks."""
