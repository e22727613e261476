"""Routes by which versions are compared: requests that they answered, and evaluations."""
