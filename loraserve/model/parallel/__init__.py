"""Base over several processes: each rank's part of it, and what ranks exchange."""
