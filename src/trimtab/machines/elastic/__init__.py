"""Elastic groups: members that join and leave while training goes on."""
