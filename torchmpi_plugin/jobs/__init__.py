"""A job of ranks: started, watched, and how it ended.

The launcher's process listens on a TCP port. mpirun starts a small supervisor per rank (:mod:`.guard`), which
connects, runs the program as its child, and sends what the program prints and how it ends. So it is known which
rank failed first and what it said, however mpirun and the other ranks end after that. Nothing here imports torch.

Uses ``node`` and ``launchers``. Start with ``spec.py`` and ``job.py``, then
``job_monitor.py`` for the launcher's end and ``supervisor.py`` for a rank's.
"""
