"""The dashboard's server: one page on loopback that is told what changes. What it shows is made in `ui`."""
