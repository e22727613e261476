"""Whether an installation can serve, and whether the server that runs is the one that its settings mean. Loads no torch: what only torch knows, a child process is asked."""
