"""What all tests share."""

from hypothesis import settings

# Times of examples say nothing here: the first one may compile, and other processes run beside.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
