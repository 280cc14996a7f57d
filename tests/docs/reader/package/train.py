"""A reader's own module."""

print("trained")
