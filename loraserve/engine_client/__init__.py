"""The engine as the server sees it: start its process, send requests, replay them after a crash.

No torch.
"""
