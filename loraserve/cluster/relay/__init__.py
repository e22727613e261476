"""The outputs' way from replicas to an ingress: those of a step in one message."""
