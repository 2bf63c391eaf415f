"""Starting and finding Ray, and all uses of its private API."""
