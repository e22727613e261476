"""What a version brings for chats with it: its template, its parsers and its defaults."""
