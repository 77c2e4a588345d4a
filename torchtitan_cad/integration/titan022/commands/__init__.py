"""Reads and runs torchtitan jobs for the commands doctor, compare, simulate and advise."""
