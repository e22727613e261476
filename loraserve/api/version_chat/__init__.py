"""Files of a version for chats with it: its template, its parsers and its defaults."""
