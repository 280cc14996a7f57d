"""The MPI library: found, loaded, initialised once.

Also what it can do with CUDA tensors and with dead ranks. Uses ``launchers`` and ``tensors``. Start with
``runtime.py``; ``library.py`` is what is known before MPI is initialised, and all that may be imported without loading
it.
"""
