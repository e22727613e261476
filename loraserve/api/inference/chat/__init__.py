"""Chats: messages and tools of a request, and the choices of its answer."""
