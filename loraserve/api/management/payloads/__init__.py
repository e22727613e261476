"""Bodies that management routes take, and the resources that they answer with."""
