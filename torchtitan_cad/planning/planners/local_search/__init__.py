"""Local changes of a finished plan: within the limits first, then fewer bytes."""
