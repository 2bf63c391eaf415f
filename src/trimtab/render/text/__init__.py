"""Answers as text for people and as data for programs."""
