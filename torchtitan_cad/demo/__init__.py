"""Data, tokenizer and model of the examples."""
