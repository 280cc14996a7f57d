"""The interface of a group to torch and users: docs/api-modes.md.

Uses ``group``. Start with ``backend.py``, the backend below torch's own process group; ``public.py`` is what this
package offers users for a group.
"""
