"""Files of an adapter on their way to and from the server."""
