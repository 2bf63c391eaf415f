"""Elastic groups: members that join and leave while a training goes on."""
