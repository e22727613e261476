"""The engine over several processes: rank 0 schedules and samples, the others compute with it."""
