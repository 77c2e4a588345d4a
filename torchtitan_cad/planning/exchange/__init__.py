"""The exchange of a plan: rows that servers need, tables of one rank, bytes, messages, kernel calls."""
