"""``loraserve run``: prompts and answers, one or a session of them on a terminal."""
