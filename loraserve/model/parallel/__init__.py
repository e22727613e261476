"""One base over several processes: which part of each weight a rank has, and what ranks exchange."""
