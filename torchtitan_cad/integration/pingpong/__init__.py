"""The loop over a model's blocks with two nano-batches."""
