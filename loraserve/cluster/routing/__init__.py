"""Where requests go: views of replicas, their ranking, and Serve's router."""
