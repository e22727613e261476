"""Routes of requests: views of replicas, their ranking, and Serve's router."""
