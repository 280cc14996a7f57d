"""A reader's own package."""
