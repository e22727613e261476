"""Cluster of engines behind one HTTP application, on Ray Serve: routing, replay, scaling."""
