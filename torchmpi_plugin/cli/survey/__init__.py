"""What ``mpiplus info`` finds out: this host, the MPI library, the launcher, and whether all ranks can talk."""
