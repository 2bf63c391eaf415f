"""The machines that run live, under a virtual clock, against traces and models of reality. No cluster."""
