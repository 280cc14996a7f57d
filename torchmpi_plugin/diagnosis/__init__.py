"""Reasons why an operation takes so long, and records of what was called.

Who has come, who has gone, what the others do; the comparison of calls; the flight recorder. Uses ``engine`` and
``store``; a group is what its protocol asks for. Start with ``diagnosis.py``.
"""
