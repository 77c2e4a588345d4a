"""A plan seen from the network: needed rows, tables of one rank, bytes, messages."""
