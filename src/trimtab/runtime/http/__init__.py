"""Shared parts of the HTTP servers: listening, tokens, limits of request heads."""
