"""Starting and finding Ray, and every use of its private parts."""
