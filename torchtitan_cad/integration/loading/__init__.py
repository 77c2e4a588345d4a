"""Batches with their plans, drawn and planned one optimizer step ahead."""
