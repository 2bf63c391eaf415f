"""Interfaces of other public tools, on top of the runtime."""
