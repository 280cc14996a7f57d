"""What torch and users get of a group: docs/faces.md.

Uses ``group``. Start with ``backend.py``, the face below torch's own process group; ``public.py`` is what this package
offers users for a group.
"""
