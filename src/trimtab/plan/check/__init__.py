"""What kills a run before or soon after it starts: rules over what its config states."""
