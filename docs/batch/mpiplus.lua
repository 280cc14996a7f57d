-- A modulefile (Lmod) for mpiplus, installed for all users: modulefiles/mpiplus/0.2.0.lua
whatis("mpiplus: a torch.distributed backend on MPI (the package torchmpi-plugin)")
help("init_process_group('mpiplus') in your script; mpiplus run -n 4 train.py starts it. mpiplus info: what was found.")

-- Where pip install --target has put it. Python, torch and the MPI are other modules, or the user's environment.
local base = "/opt/site/mpiplus/0.2.0"
prepend_path("PYTHONPATH", base)
prepend_path("PATH", pathJoin(base, "bin"))
-- depends_on("openmpi")
