"""What torch and users get of a group: docs/api-modes.md.

Uses ``group``. Start with ``backend.py``, the backend below torch's own process group; ``public.py`` is what this
package offers users for a group.
"""
